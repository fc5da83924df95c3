//! `EventStream`: the data of server-sent events, from a server that is not trusted.

use std::io::{BufRead, Read};

/// The longest line, and the longest data of one event.
const LINE_BYTES_MAX: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error("it sent a line longer than {} KiB", LINE_BYTES_MAX >> 10)]
    TooLong,
    #[error("it sent bytes that are no text in UTF-8")]
    NotText,
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

pub struct EventStream<R> {
    reader: R,
}

impl<R: BufRead> EventStream<R> {
    pub fn new(reader: R) -> Self {
        Self { reader }
    }

    /// The data of the next event that has some. `None` at the end of the stream: an event without its blank line does not
    /// count.
    pub fn next(&mut self) -> Result<Option<String>, StreamError> {
        let mut data: Option<String> = None;
        loop {
            let Some(line) = self.line()? else { return Ok(None) };
            if line.is_empty() {
                match data.take() {
                    Some(data) => return Ok(Some(data)),
                    None => continue,
                }
            }
            // Comments and other fields have no meaning here.
            let Some(value) = line.strip_prefix("data:") else { continue };
            let value = value.strip_prefix(' ').unwrap_or(value);
            match &mut data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => data = Some(value.to_owned()),
            }
            if data.as_ref().is_some_and(|data| data.len() > LINE_BYTES_MAX) {
                return Err(StreamError::TooLong);
            }
        }
    }

    /// The next line without its end.
    fn line(&mut self) -> Result<Option<String>, StreamError> {
        let mut line = Vec::new();
        let bytes = self.reader.by_ref().take(LINE_BYTES_MAX as u64 + 1).read_until(b'\n', &mut line)?;
        if bytes > LINE_BYTES_MAX {
            return Err(StreamError::TooLong);
        }
        // The end of the stream, perhaps in the middle of a line.
        let Some(b'\n') = line.pop() else { return Ok(None) };
        line.pop_if(|byte| *byte == b'\r');
        String::from_utf8(line).map(Some).map_err(|_| StreamError::NotText)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufReader, repeat};

    use super::*;

    fn all(text: &[u8]) -> Vec<String> {
        // Small reads, as from a network.
        let mut stream = EventStream::new(BufReader::with_capacity(3, text));
        std::iter::from_fn(|| stream.next().unwrap()).collect()
    }

    #[test]
    fn an_event_is_its_data() {
        assert_eq!(all(b"data: a\n\ndata:b\r\n\r\n"), ["a", "b"]);
        assert_eq!(all(b": wait\n\nevent: x\nid: 1\ndata: a\ndata: b\n\n\n\ndata: \n\n"), ["a\nb", ""]);
    }

    #[test]
    fn an_event_that_is_cut_off_does_not_count() {
        for text in [&b"data: a\n\ndata: b"[..], b"data: a\n\ndata: b\n", b"data: a\n\nda"] {
            assert_eq!(all(text), ["a"]);
        }
    }

    #[test]
    fn what_has_no_end_or_is_no_text_is_an_error() {
        let error = |text: &mut dyn BufRead| EventStream::new(text).next().unwrap_err().to_string();
        assert!(error(&mut BufReader::new(repeat(b'a'))).contains("longer than 1024 KiB"));
        let lines = b"data: 0123456789\n".repeat(1 << 17);
        assert!(error(&mut &lines[..]).contains("longer than 1024 KiB"));
        assert!(error(&mut &b"data: \xff\n\n"[..]).contains("UTF-8"));
    }
}
