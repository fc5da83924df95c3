//! `ChannelSink`: sends the events of one request from the engine's thread to the handler, and measures their times.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::{EventKind, EventSink};
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use crate::metrics::RequestTimer;

/// The maximum number of unread events of one generation. If the client does not keep up, the generation is cancelled: the
/// engine never waits for a client, and memory stays bounded.
pub const EVENTS_MAX: usize = 1 << 14;

pub struct ChannelSink {
    choice: usize,
    events: Sender<(usize, EventKind)>,
    overrun: Arc<AtomicBool>,
    timer: RequestTimer,
}

impl ChannelSink {
    pub fn new(
        choice: usize,
        events: Sender<(usize, EventKind)>,
        overrun: Arc<AtomicBool>,
        timer: RequestTimer,
    ) -> Self {
        Self { choice, events, overrun, timer }
    }
}

impl EventSink for ChannelSink {
    fn send(&mut self, event: EventKind) -> bool {
        self.timer.record(&event);
        let sent = self.events.try_send((self.choice, event));
        if matches!(sent, Err(TrySendError::Full(_))) {
            self.overrun.store(true, Ordering::Relaxed);
        }
        sent.is_ok()
    }
}
