//! Frames: a payload with its length before it. One form between peers, another one for callers on the same host.

use std::io::{self, ErrorKind, Read};

use crate::KwaaiWireError;
use crate::protobuf::{VARINT_BYTES_MAX, put_varint, varint};

/// The longest payload between peers that KwaaiNet accepts.
pub const FRAME_BYTES_MAX: usize = 10 << 20;
/// The longest payload on the same host that we accept. KwaaiNet has no limit.
pub const LOCAL_FRAME_BYTES_MAX: usize = 64 << 20;

#[derive(Debug, thiserror::Error)]
pub enum KwaaiStreamError {
    /// A peer that refuses the protocol may do this too, if the protocol was proposed together with the call.
    #[error("the other side closed the stream before a frame")]
    Closed,
    #[error("the other side sent something else than KwaaiNet's protocol: {0}")]
    Wire(#[from] KwaaiWireError),
    #[error("read a frame")]
    Io(#[source] io::Error),
}

/// The length before a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub header_bytes: usize,
    pub payload_bytes: usize,
}

/// The header at the front of `bytes`, with a payload of at most `max`. `None` if more bytes are needed to tell.
pub fn frame_header(bytes: &[u8], max: usize) -> Result<Option<FrameHeader>, KwaaiWireError> {
    let Some((length, rest)) = varint(bytes)? else { return Ok(None) };
    let payload_bytes = within(length, max.min(FRAME_BYTES_MAX))?;
    Ok(Some(FrameHeader { header_bytes: bytes.len() - rest.len(), payload_bytes }))
}

/// Reads a frame between peers: its payload, of at most `max` bytes.
pub fn read_frame(stream: &mut impl Read, max: usize) -> Result<Vec<u8>, KwaaiStreamError> {
    let mut header = [0; VARINT_BYTES_MAX];
    for bytes in 1..=VARINT_BYTES_MAX {
        read_header(stream, &mut header[bytes - 1..bytes], bytes == 1)?;
        if let Some(header) = frame_header(&header[..bytes], max)? {
            return read_payload(stream, header.payload_bytes);
        }
    }
    Err(KwaaiWireError::Varint.into())
}

/// Reads a frame of a caller on the same host, or of its reply: its payload, of at most `max` bytes.
pub fn read_local_frame(stream: &mut impl Read, max: usize) -> Result<Vec<u8>, KwaaiStreamError> {
    let mut header = [0; 4];
    read_header(stream, &mut header, true)?;
    let bytes = within(u32::from_le_bytes(header).into(), max.min(LOCAL_FRAME_BYTES_MAX))?;
    read_payload(stream, bytes)
}

/// The frame of a call or a reply on the same host. Its payload is not in an envelope.
pub fn local_frame(payload: &[u8]) -> Result<Vec<u8>, KwaaiWireError> {
    let bytes = within(payload.len() as u64, LOCAL_FRAME_BYTES_MAX)?;
    Ok([&(bytes as u32).to_le_bytes()[..], payload].concat())
}

pub(crate) fn put_header(out: &mut Vec<u8>, payload_bytes: usize) {
    put_varint(out, payload_bytes as u64);
}

fn within(bytes: u64, max: usize) -> Result<usize, KwaaiWireError> {
    usize::try_from(bytes).ok().filter(|&bytes| bytes <= max).ok_or(KwaaiWireError::FrameTooLong { bytes, max })
}

fn read_header(stream: &mut impl Read, header: &mut [u8], is_first: bool) -> Result<(), KwaaiStreamError> {
    let mut filled = 0;
    while filled < header.len() {
        match stream.read(&mut header[filled..]) {
            Ok(0) if is_first && filled == 0 => return Err(KwaaiStreamError::Closed),
            Ok(0) => return Err(KwaaiWireError::Truncated("length").into()),
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(KwaaiStreamError::Io(error)),
        }
    }
    Ok(())
}

/// Memory grows with the bytes that come, so a length alone allocates nothing.
fn read_payload(stream: &mut impl Read, bytes: usize) -> Result<Vec<u8>, KwaaiStreamError> {
    let mut payload = Vec::new();
    stream.take(bytes as u64).read_to_end(&mut payload).map_err(KwaaiStreamError::Io)?;
    if payload.len() < bytes { Err(KwaaiWireError::Truncated("payload").into()) } else { Ok(payload) }
}
