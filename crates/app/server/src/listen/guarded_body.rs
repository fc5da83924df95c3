//! `GuardedBody`: a body that holds a guard until it has been read to its end, or is dropped.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Body, Frame, SizeHint};

/// What a body holds while it is read.
pub trait BodyGuard {
    /// The body was asked for a frame and has not ended; `has_frame`: it had one.
    fn polled(&mut self, has_frame: bool) {
        let _ = has_frame;
    }
}

pub struct GuardedBody<B, G> {
    body: B,
    guard: Option<G>,
}

impl<B: Body, G> GuardedBody<B, G> {
    /// The guard of a body without data is dropped at once.
    pub fn new(body: B, guard: G) -> Self {
        let guard = (!body.is_end_stream()).then_some(guard);
        Self { body, guard }
    }
}

impl<B: Body + Unpin, G: BodyGuard + Unpin> Body for GuardedBody<B, G> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        let has_ended = matches!(frame, Poll::Ready(None | Some(Err(_)))) || self.body.is_end_stream();
        match &mut self.guard {
            Some(guard) if !has_ended => guard.polled(frame.is_ready()),
            guard => *guard = None,
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
