//! Frames on a stream of bytes.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};

use super::WireError;

/// How long the rest of a frame may take after its first byte, and how long a frame may take to be sent.
pub const FRAME_TIME_MAX: Duration = Duration::from_secs(30);
/// Memory grows in such steps with the bytes that come, so a length alone allocates little.
const CHUNK_BYTES: usize = 1 << 20;
const HEADER_BYTES: usize = 5;
/// So much of a body is written together with the header: a small frame takes no packet more than it needs.
const FIRST_WRITE_BYTES: usize = 16 << 10;

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {bytes} bytes is too long, the limit is {max}")]
    TooLong { bytes: usize, max: usize },
    #[error("a frame took longer than {FRAME_TIME_MAX:?}")]
    TooSlow,
    #[error("the stream ended")]
    Closed,
    #[error("the stream failed: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// The beginning of a frame that has begun to come.
#[derive(Clone, Copy, Debug)]
pub struct FrameHead {
    pub kind: u8,
    /// Of its body.
    pub bytes: usize,
    deadline: Instant,
}

/// Replaces `body` with the next frame's, of at most `max` bytes, and returns its kind. It waits for a frame for any time, but
/// a frame that has begun has to end. [`FrameError::Closed`] between two frames is an orderly end.
pub async fn read_frame(from: &mut (impl AsyncRead + Unpin), max: usize, body: &mut Vec<u8>) -> Result<u8, FrameError> {
    let head = read_head(from, max).await?;
    head.read_body(from, body).await?;
    Ok(head.kind)
}

/// The same for the beginning alone, before memory is needed for the rest.
pub async fn read_head(from: &mut (impl AsyncRead + Unpin), max: usize) -> Result<FrameHead, FrameError> {
    let mut header = [0; HEADER_BYTES];
    if from.read(&mut header[..1]).await? == 0 {
        return Err(FrameError::Closed);
    }
    let deadline = Instant::now() + FRAME_TIME_MAX;
    timeout_at(deadline, from.read_exact(&mut header[1..])).await.map_err(|_| FrameError::TooSlow)??;
    let [a, b, c, d, kind] = header;
    let bytes = u32::from_le_bytes([a, b, c, d]) as usize;
    if bytes > max {
        return Err(FrameError::TooLong { bytes, max });
    }
    Ok(FrameHead { kind, bytes, deadline })
}

impl FrameHead {
    /// Waits for something within the time of the frame.
    pub async fn within<T>(&self, wait: impl Future<Output = T>) -> Result<T, FrameError> {
        timeout_at(self.deadline, wait).await.map_err(|_| FrameError::TooSlow)
    }

    /// Replaces `body` with the frame's.
    pub async fn read_body(&self, from: &mut (impl AsyncRead + Unpin), body: &mut Vec<u8>) -> Result<(), FrameError> {
        let read = async {
            body.clear();
            while body.len() < self.bytes {
                let start = body.len();
                body.resize(self.bytes.min(start + CHUNK_BYTES), 0);
                from.read_exact(&mut body[start..]).await?;
            }
            Ok(())
        };
        self.within(read).await?
    }
}

pub async fn write_frame(to: &mut (impl AsyncWrite + Unpin), kind: u8, body: &[u8]) -> Result<(), FrameError> {
    let bytes =
        u32::try_from(body.len()).map_err(|_| FrameError::TooLong { bytes: body.len(), max: u32::MAX as usize })?;
    let (first, rest) = body.split_at(body.len().min(FIRST_WRITE_BYTES));
    let start = [&bytes.to_le_bytes()[..], &[kind], first].concat();
    let write = async {
        to.write_all(&start).await?;
        to.write_all(rest).await?;
        to.flush().await
    };
    Ok(timeout(FRAME_TIME_MAX, write).await.map_err(|_| FrameError::TooSlow)??)
}
