//! `Clock`: where the engine reads the time, so that tests decide how long steps take.

use std::time::Instant;

pub(crate) struct Clock(Box<dyn Fn() -> Instant + Send>);

impl Clock {
    pub fn new(now: impl Fn() -> Instant + Send + 'static) -> Self {
        Self(Box::new(now))
    }

    pub fn now(&self) -> Instant {
        (self.0)()
    }
}
