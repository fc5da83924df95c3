//! Where the engine's thread leaves its events, and what is measured there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::{EventKind, EventSink};
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use crate::metrics::RequestClock;

/// Events of one answer that may wait to be read. A reader that is slower for longer is cut off: the engine waits for
/// nobody, and memory is not for those who do not read.
pub const EVENTS_MAX: usize = 1 << 14;

pub struct Sink {
    choice: usize,
    events: Sender<(usize, EventKind)>,
    overrun: Arc<AtomicBool>,
    clock: RequestClock,
}

impl Sink {
    pub fn new(
        choice: usize,
        events: Sender<(usize, EventKind)>,
        overrun: Arc<AtomicBool>,
        clock: RequestClock,
    ) -> Self {
        Self { choice, events, overrun, clock }
    }
}

impl EventSink for Sink {
    fn send(&mut self, event: EventKind) -> bool {
        self.clock.note(&event);
        let sent = self.events.try_send((self.choice, event));
        if matches!(sent, Err(TrySendError::Full(_))) {
            self.overrun.store(true, Ordering::Relaxed);
        }
        sent.is_ok()
    }
}
