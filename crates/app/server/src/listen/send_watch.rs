//! `SendWatch`: finds out that a client does not take the responses of its connection.
//!
//! A client of HTTP/2 can hold back a response without a pending write: it gives the stream no window. Then hyper does not ask
//! for the next frame of the body, and that is what is watched here.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::guarded_body::BodyGuard;

/// The responses of one connection.
pub struct SendWatch(Mutex<SendState>);

struct SendState {
    /// Requests whose responses have not ended.
    requests: usize,
    /// Those that have a frame, or the first one, and whose client does not take it.
    held: usize,
    changed_at: Instant,
}

impl SendWatch {
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(SendState { requests: 0, held: 0, changed_at: Instant::now() })))
    }

    /// A request has begun. Its response has ended when the guard is dropped.
    pub fn begin(self: &Arc<Self>) -> SendGuard {
        self.lock().requests += 1;
        SendGuard { watch: Arc::clone(self), is_held: false }
    }

    /// Waits until the client has held back all its responses for `limit`. One that is still being computed is not held back.
    pub async fn stalled(&self, limit: Duration) {
        loop {
            let now = Instant::now();
            let until = {
                let state = self.lock();
                let is_held = state.requests > 0 && state.held == state.requests;
                if is_held { state.changed_at + limit } else { now + limit }
            };
            if until <= now {
                return;
            }
            sleep_until(until).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, SendState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request whose response has not ended.
pub struct SendGuard {
    watch: Arc<SendWatch>,
    is_held: bool,
}

impl SendGuard {
    /// The response has begun: it is held back until its client takes the first frame.
    #[must_use]
    pub fn begun(mut self) -> Self {
        self.set_held(true);
        self
    }

    fn set_held(&mut self, is_held: bool) {
        let mut state = self.watch.lock();
        state.held = state.held + usize::from(is_held) - usize::from(self.is_held);
        state.changed_at = Instant::now();
        self.is_held = is_held;
    }
}

/// A body is held back from its last frame until it is asked for the next one.
impl BodyGuard for SendGuard {
    fn polled(&mut self, has_frame: bool) {
        self.set_held(has_frame);
    }
}

impl Drop for SendGuard {
    fn drop(&mut self) {
        let mut state = self.watch.lock();
        state.requests -= 1;
        state.held -= usize::from(self.is_held);
        state.changed_at = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use tokio::time::sleep;

    const LIMIT: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_stalled_when_all_its_responses_are_held_back() {
        let (watch, begun) = (SendWatch::new(), Instant::now());
        let (mut held, mut computed) = (watch.begin(), watch.begin());
        held.set_held(true);
        let answer = async {
            sleep(LIMIT * 10).await;
            computed.set_held(true);
        };
        tokio::join!(watch.stalled(LIMIT), answer);
        assert!(begun.elapsed() >= LIMIT * 11 && begun.elapsed() <= LIMIT * 12, "{:?}", begun.elapsed());
        drop((held, computed));
        assert!(watch.stalled(LIMIT).now_or_never().is_none());
        let state = watch.lock();
        assert_eq!((state.requests, state.held), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_frames_slowly_is_not_stalled() {
        let watch = SendWatch::new();
        let mut guard = watch.begin();
        let take = async {
            for _ in 0..10 {
                sleep(LIMIT - Duration::from_secs(1)).await;
                guard.set_held(true);
            }
        };
        tokio::select! {
            () = watch.stalled(LIMIT) => panic!("it is stalled"),
            () = take => {}
        }
    }
}
