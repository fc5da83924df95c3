//! `PiecedBody`: a body in pieces. hyper takes one frame at a time, so a client that reads a long frame slowly would look like one
//! that does not read, and a body of one frame would have ended before it is sent.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Bytes;
use hyper::body::{Body, Frame, SizeHint};

/// The maximum bytes of a frame. A client that reads fewer in a minute is disconnected.
const PIECE_BYTES_MAX: usize = 64 << 10;

pub struct PiecedBody<B> {
    body: B,
    /// What is left of the last frame.
    rest: Bytes,
}

impl<B> PiecedBody<B> {
    pub fn new(body: B) -> Self {
        Self { body, rest: Bytes::new() }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for PiecedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if self.rest.is_empty() {
            let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => frame,
                end => return Poll::Ready(end),
            };
            match frame.into_data() {
                Ok(data) => self.rest = data,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
        let bytes = self.rest.len().min(PIECE_BYTES_MAX);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (inner, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + rest);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{BodyExt, Full};

    #[tokio::test]
    async fn a_long_frame_ends_with_its_last_piece() {
        let bytes: Vec<u8> = (0..2 * PIECE_BYTES_MAX + 1).map(|number| number as u8).collect();
        let mut body = PiecedBody::new(Full::new(Bytes::from(bytes.clone())));
        let mut received = Vec::new();
        for left in [bytes.len(), PIECE_BYTES_MAX + 1, 1] {
            assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some(left as u64), false));
            let piece = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert!(piece.len() <= PIECE_BYTES_MAX);
            received.extend_from_slice(&piece);
        }
        assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some(0), true));
        assert!(body.frame().await.is_none() && received == bytes);
    }
}
