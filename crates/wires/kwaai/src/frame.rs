//! Frames: a payload with its length before it. One form between peers, another one for callers on the same host. Whoever has
//! the stream reads a header until it is whole, and then the payload, with memory that grows with the bytes that come.

use crate::KwaaiWireError;
use crate::protobuf::{put_varint, varint};

/// The longest payload between peers that KwaaiNet accepts.
pub const FRAME_BYTES_MAX: usize = 10 << 20;
/// The longest payload on the same host that we accept. KwaaiNet has no limit.
pub const LOCAL_FRAME_BYTES_MAX: usize = 64 << 20;

/// The length before a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub header_bytes: usize,
    pub payload_bytes: usize,
}

/// The header at the front of `bytes` of a frame between peers, with a payload of at most `max`. `None` if more bytes are needed
/// to tell; ten are always enough.
pub fn frame_header(bytes: &[u8], max: usize) -> Result<Option<FrameHeader>, KwaaiWireError> {
    let Some((length, rest)) = varint(bytes)? else { return Ok(None) };
    let payload_bytes = within(length, max.min(FRAME_BYTES_MAX))?;
    Ok(Some(FrameHeader { header_bytes: bytes.len() - rest.len(), payload_bytes }))
}

/// As [`frame_header`], of a call on the same host or of its reply.
pub fn local_frame_header(bytes: &[u8], max: usize) -> Result<Option<FrameHeader>, KwaaiWireError> {
    let Some((length, _)) = bytes.split_first_chunk() else { return Ok(None) };
    let payload_bytes = within(u32::from_le_bytes(*length).into(), max.min(LOCAL_FRAME_BYTES_MAX))?;
    Ok(Some(FrameHeader { header_bytes: length.len(), payload_bytes }))
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
