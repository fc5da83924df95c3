//! `Generation`: one request on an engine that is otherwise idle, as an iterator.

use crate::engine::{Engine, EngineError};
use crate::executor::Executor;
use crate::request::{Event, EventKind, Finished, RequestId};

/// The events of one request; each call of `next` runs the engine as far as needed. The last one is [`EventKind::Finished`].
pub struct Generation<'a, E: Executor> {
    engine: &'a mut Engine<E>,
    request: RequestId,
    /// Events of the last step in reverse order.
    events: Vec<Event>,
    ended: bool,
}

impl<'a, E: Executor> Generation<'a, E> {
    pub(crate) fn new(engine: &'a mut Engine<E>, request: RequestId) -> Self {
        Self { engine, request, events: Vec::new(), ended: false }
    }

    /// Cancels the request. `None` if it has ended already.
    pub fn cancel(&mut self) -> Option<Finished> {
        self.ended = true;
        self.engine.cancel(self.request)
    }
}

impl<E: Executor> Iterator for Generation<'_, E> {
    type Item = Result<EventKind, EngineError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            if let Some(event) = self.events.pop() {
                self.ended = matches!(event.kind, EventKind::Finished(_));
                return Some(Ok(event.kind));
            }
            match self.engine.step(&mut self.events) {
                Ok(ran) => {
                    self.ended = !ran && self.events.is_empty();
                    self.events.reverse();
                }
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}

impl<E: Executor> Drop for Generation<'_, E> {
    fn drop(&mut self) {
        self.engine.cancel(self.request);
    }
}
