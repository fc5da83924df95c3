//! Reads and writes frames on async streams. The crate `kwaai` knows what is in them.

use std::io;

use kwaai::{FrameHeader, KwaaiWireError, frame_header, local_frame_header};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// A varint of 64 bits, the longer of the two headers.
const HEADER_BYTES_MAX: usize = 10;

#[derive(Debug, thiserror::Error)]
pub enum KwaaiStreamError {
    /// A peer that refuses the protocol may do this too, if the protocol was proposed together with the call.
    #[error("the other side closed the stream before a frame")]
    Closed,
    #[error("the other side sent something else than KwaaiNet's protocol: {0}")]
    Wire(#[from] KwaaiWireError),
    #[error("the client has too many calls at once")]
    TooManyCalls,
    #[error("the other side was too slow")]
    TooSlow,
    #[error("read or write a frame")]
    Io(#[from] io::Error),
}

/// Where a stream comes from decides how its frames look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameForm {
    /// Between peers: the payload is an envelope.
    Enveloped,
    /// Of the local TCP bypass: the payload is the request or the reply itself.
    Local,
}

/// Reads a header byte by byte, so nothing of the payload is taken. Returns the length of the payload, at most `max`.
pub(super) async fn read_header(
    stream: &mut (impl AsyncRead + Unpin),
    form: FrameForm,
    max: usize,
) -> Result<usize, KwaaiStreamError> {
    let mut header = [0; HEADER_BYTES_MAX];
    for bytes in 1..=HEADER_BYTES_MAX {
        if stream.read(&mut header[bytes - 1..bytes]).await? == 0 {
            let is_first = bytes == 1;
            return Err(if is_first { KwaaiStreamError::Closed } else { KwaaiWireError::Truncated("length").into() });
        }
        let read = match form {
            FrameForm::Enveloped => frame_header(&header[..bytes], max),
            FrameForm::Local => local_frame_header(&header[..bytes], max),
        };
        if let Some(FrameHeader { payload_bytes, .. }) = read? {
            return Ok(payload_bytes);
        }
    }
    Err(KwaaiWireError::Varint.into())
}

/// Reads a payload. Memory grows with the bytes that come, so a length alone allocates nothing.
pub(super) async fn read_payload(
    stream: &mut (impl AsyncRead + Unpin),
    bytes: usize,
) -> Result<Vec<u8>, KwaaiStreamError> {
    let mut payload = Vec::new();
    stream.take(bytes as u64).read_to_end(&mut payload).await?;
    if payload.len() < bytes { Err(KwaaiWireError::Truncated("payload").into()) } else { Ok(payload) }
}

pub(super) async fn write_frame(stream: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> Result<(), KwaaiStreamError> {
    stream.write_all(frame).await?;
    Ok(stream.flush().await?)
}

#[cfg(test)]
mod tests {
    use kwaai::FRAME_BYTES_MAX;

    use super::*;

    async fn read(mut bytes: &[u8], form: FrameForm, max: usize) -> Result<Vec<u8>, KwaaiStreamError> {
        let payload_bytes = read_header(&mut bytes, form, max).await?;
        read_payload(&mut bytes, payload_bytes).await
    }

    #[tokio::test]
    async fn a_stream_that_ends_early_is_told_from_one_that_never_began() {
        for (form, header) in [(FrameForm::Enveloped, &[2][..]), (FrameForm::Local, &[2, 0, 0, 0])] {
            let read = async |tail: &[u8]| read(&[header, tail].concat(), form, 9).await;
            assert_eq!(read(&[0xaa, 0xbb, 0xcc]).await.unwrap(), [0xaa, 0xbb]);
            let cut = read(&[0xaa]).await;
            assert!(matches!(cut, Err(KwaaiStreamError::Wire(KwaaiWireError::Truncated("payload")))), "{cut:?}");
            assert!(matches!(super::tests::read(&[], form, 9).await, Err(KwaaiStreamError::Closed)));
        }
        for (form, header) in [(FrameForm::Enveloped, &[0x80][..]), (FrameForm::Local, &[2, 0, 0])] {
            let cut = read(header, form, 9).await;
            assert!(matches!(cut, Err(KwaaiStreamError::Wire(KwaaiWireError::Truncated("length")))), "{cut:?}");
        }
    }

    #[tokio::test]
    async fn a_frame_that_is_too_long_is_refused_before_its_payload() {
        for (form, header) in [(FrameForm::Enveloped, &[10][..]), (FrameForm::Local, &[10, 0, 0, 0])] {
            let refused = read(header, form, 9).await;
            let too_long = KwaaiWireError::FrameTooLong { bytes: 10, max: 9 };
            assert!(matches!(refused, Err(KwaaiStreamError::Wire(error)) if error == too_long));
        }
        let endless = read(&[0xff; 16], FrameForm::Enveloped, FRAME_BYTES_MAX).await;
        assert!(matches!(endless, Err(KwaaiStreamError::Wire(KwaaiWireError::Varint))), "{endless:?}");
    }
}
