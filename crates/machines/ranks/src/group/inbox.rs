//! `Inbox`: reads replies from a non-blocking pipe, whose bytes arrive in pieces.

use std::io::{self, ErrorKind, Read};

use crate::protocol::{LINE_BYTES_MAX, LineMessage as _, RankReply, ReadError, decode_reusing};

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
    /// A reply whose attached bytes have not all arrived.
    partial: Option<RankReply>,
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

    /// The next reply that has arrived. A `spare` reply of the same op is taken, and its memory is reused.
    pub fn next(&mut self, spare: &mut Option<RankReply>) -> Option<Result<RankReply, ReadError>> {
        if let Some(reply) = self.partial.take() {
            return self.complete(reply).map(Ok);
        }
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
                return match decode_reusing(line, spare) {
                    Ok(reply) => self.complete(reply).map(Ok),
                    Err(error) => Some(Err(error)),
                };
            }
        }
    }

    /// The reply with what is attached to it, or nothing until that has arrived.
    fn complete(&mut self, mut reply: RankReply) -> Option<RankReply> {
        if let Some(attached) = reply.attached_mut() {
            let mut arrived = &self.bytes[self.used..];
            let missing = attached.missing();
            if arrived.len() < missing || attached.read(&mut arrived).is_err() {
                self.partial = Some(reply);
                return None;
            }
            self.used += missing;
            self.searched = self.used;
        }
        Some(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::output::WireOutput;
    use crate::protocol::{Attached, encode};

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
    fn attached_bytes_are_whole_however_they_come() {
        let values: Vec<f32> = (0..40).map(|n| n as f32 * 0.1).collect();
        let output = WireOutput { states: Attached::of_f32(&values), ..WireOutput::default() };
        let replies = [RankReply::StepOk { id: 7, output }, RankReply::Bye];
        let mut sent = Vec::new();
        replies.iter().for_each(|reply| encode(reply, &mut sent).unwrap());
        for size in 1..sent.len() {
            let mut pieces = Pieces(sent.chunks(size).map(<[u8]>::to_vec).collect());
            let (mut inbox, mut received) = (Inbox::default(), Vec::new());
            while inbox.fill(&mut pieces).unwrap() {
                received.extend(std::iter::from_fn(|| inbox.next(&mut None)).map(Result::unwrap));
            }
            assert_eq!(received, replies, "pieces of {size}");
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
