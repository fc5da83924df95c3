//! The header of a frame.

use super::CakeWireError;

/// The longest payload that cake accepts.
pub const FRAME_BYTES_MAX: usize = 512 << 20;
pub const FRAME_HEADER_BYTES: usize = 8;

const MAGIC: u32 = 0x0104_F4C7;

/// Reads a header: the length of the payload that follows, which is at most `max`.
pub fn payload_bytes(header: [u8; FRAME_HEADER_BYTES], max: usize) -> Result<usize, CakeWireError> {
    let [m0, m1, m2, m3, length @ ..] = header;
    if u32::from_be_bytes([m0, m1, m2, m3]) != MAGIC {
        return Err(CakeWireError::Magic);
    }
    let bytes = u32::from_be_bytes(length) as usize;
    let max = max.min(FRAME_BYTES_MAX);
    if bytes > max { Err(CakeWireError::FrameTooLong { bytes, max }) } else { Ok(bytes) }
}

/// A frame whose payload `write` appends.
pub(super) fn frame(write: impl FnOnce(&mut Vec<u8>)) -> Result<Vec<u8>, CakeWireError> {
    let mut frame = vec![0; FRAME_HEADER_BYTES];
    write(&mut frame);
    let bytes = frame.len() - FRAME_HEADER_BYTES;
    if bytes > FRAME_BYTES_MAX {
        return Err(CakeWireError::FrameTooLong { bytes, max: FRAME_BYTES_MAX });
    }
    frame[..4].copy_from_slice(&MAGIC.to_be_bytes());
    frame[4..FRAME_HEADER_BYTES].copy_from_slice(&(bytes as u32).to_be_bytes());
    Ok(frame)
}
