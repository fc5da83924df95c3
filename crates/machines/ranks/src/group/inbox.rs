//! `Inbox`: reads replies from a non-blocking pipe, whose bytes arrive in pieces.

use std::io::{self, ErrorKind, Read};

use crate::protocol::{LINE_BYTES_MAX, RankReply, ReadError, decode_reusing};

/// Bytes per read: enough for an ordinary reply; after a full read, more.
const PIECE_BYTES: usize = 1 << 12;
const PIECE_BYTES_MAX: usize = 1 << 16;

/// Buffer capacity that is kept after a long line.
const KEPT_BYTES: usize = 1 << 20;

#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    /// Bytes at the start of `bytes` that were decoded as lines.
    used: usize,
    /// Bytes at the start of `bytes` that hold no further line end.
    searched: usize,
}

impl Inbox {
    /// Reads what is available. False at the end of the stream.
    pub fn fill(&mut self, mut from: impl Read) -> io::Result<bool> {
        self.bytes.drain(..self.used);
        self.searched -= self.used;
        self.used = 0;
        self.bytes.shrink_to(KEPT_BYTES);
        let mut piece = PIECE_BYTES;
        loop {
            let start = self.bytes.len();
            self.bytes.resize(start + piece, 0);
            let read = from.read(&mut self.bytes[start..]);
            self.bytes.truncate(start + read.as_ref().copied().unwrap_or(0));
            match read {
                Ok(0) => return Ok(false),
                // If more has arrived meanwhile, the next `poll` reports it.
                Ok(count) if count < piece || self.bytes.len() > LINE_BYTES_MAX => return Ok(true),
                Ok(_) => piece = PIECE_BYTES_MAX,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }

    /// Decodes the next complete line. A `spare` reply of the same op is taken, and its memory is reused.
    pub fn next(&mut self, spare: &mut Option<RankReply>) -> Option<Result<RankReply, ReadError>> {
        loop {
            let from = self.searched.max(self.used);
            let Some(end) = self.bytes[from..].iter().position(|&byte| byte == b'\n').map(|at| from + at) else {
                self.searched = self.bytes.len();
                let too_long = self.bytes.len() - self.used > LINE_BYTES_MAX;
                return too_long.then_some(Err(ReadError::TooLong { max: LINE_BYTES_MAX }));
            };
            let line = &self.bytes[self.used..end];
            (self.used, self.searched) = (end + 1, end + 1);
            if !line.trim_ascii().is_empty() {
                return Some(decode_reusing(line, spare));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that returns its pieces one by one, with `WouldBlock` after each.
    struct Pieces(Vec<Vec<u8>>);

    impl Read for Pieces {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            match self.0.first_mut() {
                None => Ok(0),
                Some(piece) if piece.is_empty() => {
                    self.0.remove(0);
                    Err(ErrorKind::WouldBlock.into())
                }
                Some(piece) => {
                    let count = piece.len().min(into.len());
                    into[..count].copy_from_slice(&piece[..count]);
                    piece.drain(..count);
                    Ok(count)
                }
            }
        }
    }

    #[test]
    fn lines_are_whole_however_their_bytes_come() {
        let text = b"{\"op\":\"init_ok\"}\n\n{\"op\":\"bye\"}\n{\"op\":";
        for size in 1..text.len() {
            let mut pieces = Pieces(text.chunks(size).map(<[u8]>::to_vec).collect());
            let (mut inbox, mut replies) = (Inbox::default(), Vec::new());
            while inbox.fill(&mut pieces).unwrap() {
                replies.extend(std::iter::from_fn(|| inbox.next(&mut None)).map(Result::unwrap));
            }
            assert_eq!(replies, [RankReply::InitOk, RankReply::Bye], "pieces of {size}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut inbox = Inbox::default();
        let open = inbox.fill(io::repeat(b'x').take(LINE_BYTES_MAX as u64 + 2)).unwrap();
        assert!(open);
        assert!(matches!(inbox.next(&mut None), Some(Err(ReadError::TooLong { .. }))));
    }
}
