//! `GuardedBody`: a body that holds a guard until it has been read to its end, or is dropped.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Body, Frame, SizeHint};

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

impl<B: Body + Unpin, G: Unpin> Body for GuardedBody<B, G> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None | Some(Err(_)))) || self.body.is_end_stream() {
            self.guard = None;
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
