//! `LoadObserver`: what happens while a model is loaded.

use tracing::info;

use crate::chain_monitor::ChainMonitor;

pub trait LoadObserver {
    /// So many layers are loaded.
    fn layers(&mut self, done: usize);

    /// Other machines will run layers: what is known of them from now on.
    fn cluster(&mut self, _monitor: ChainMonitor) {}

    /// The first chain of machines cannot be formed yet.
    fn waiting(&mut self, why: &str) {
        info!("waiting for machines: {why}");
    }
}

/// For those who want to know the layers only.
impl<F: FnMut(usize)> LoadObserver for F {
    fn layers(&mut self, done: usize) {
        self(done);
    }
}
