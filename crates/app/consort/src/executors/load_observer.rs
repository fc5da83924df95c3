//! `LoadObserver`: what happens while a model is loaded.

use std::sync::Arc;

use indicatif::ProgressBar;
use server::{ClusterMonitor, Inviter};

use super::cluster::ChainMonitor;
use crate::progress;
use crate::terminal;

pub trait LoadObserver {
    /// So many layers are loaded.
    fn layers(&mut self, done: usize);

    /// Others will run layers: what is known of them from now on. `what` they are: machines, or peers of a swarm.
    fn others(&mut self, _what: &str, _monitor: Arc<dyn ClusterMonitor>) {}

    /// They are a chain of machines.
    fn chain(&mut self, _monitor: &ChainMonitor) {}

    /// Others can be invited to the cluster of this machine.
    fn inviter(&mut self, _inviter: Arc<dyn Inviter>) {}

    /// The first chain of machines cannot be formed yet.
    fn waiting(&mut self, why: &str) {
        self.note(&format!("waiting for machines: {why}"));
    }

    /// So many bytes of weights have come to other machines, of all that they lack.
    fn weights(&mut self, _received: u64, _total: u64) {}

    /// Something that users want to know, such as why a machine is not used.
    fn note(&mut self, text: &str) {
        terminal::note(text);
    }
}

/// For those who want to know the layers only.
impl<F: FnMut(usize)> LoadObserver for F {
    fn layers(&mut self, done: usize) {
        self(done);
    }
}

/// Shows progress bars in a terminal.
pub struct LoadBars {
    layers: ProgressBar,
    weights: WeightsBar,
}

impl LoadBars {
    pub fn new(layers: usize) -> Self {
        Self { layers: progress::steps(layers as u64, "loading"), weights: WeightsBar::default() }
    }
}

impl LoadObserver for LoadBars {
    fn layers(&mut self, done: usize) {
        self.layers.set_position(done as u64);
    }

    fn weights(&mut self, received: u64, total: u64) {
        self.weights.update(received, total);
    }

    fn note(&mut self, text: &str) {
        progress::suspend(|| terminal::note(text));
    }
}

impl Drop for LoadBars {
    fn drop(&mut self) {
        self.layers.finish_and_clear();
    }
}

/// A bar for weights on their way to other machines. There is none until there are some.
#[derive(Default)]
pub struct WeightsBar(Option<ProgressBar>);

impl WeightsBar {
    pub fn update(&mut self, received: u64, total: u64) {
        if total == 0 {
            return;
        }
        let bar =
            self.0.get_or_insert_with(|| progress::beside_log(progress::bytes(total).with_message("sending weights")));
        bar.set_length(total);
        bar.set_position(received);
    }
}

impl Drop for WeightsBar {
    fn drop(&mut self) {
        self.0.iter().for_each(ProgressBar::finish_and_clear);
    }
}
