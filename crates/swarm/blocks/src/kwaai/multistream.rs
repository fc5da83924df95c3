//! The dialer's side of multistream-select 1, by which both ends of a stream agree on its protocol. The crate of rust-libp2p does
//! the same, but refuses names without a leading slash, and hivemind's RPCs have such names.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const VERSION: &str = "/multistream/1.0.0";
const NOT_AVAILABLE: &str = "na";
/// The longest line, with its end. Names are shorter, so a length is always one byte or two.
const LINE_BYTES_MAX: usize = 1024;

#[derive(Debug, thiserror::Error)]
pub enum NegotiationError {
    #[error("the protocol {0} is not served there")]
    NotAvailable(String),
    #[error("the other side does not negotiate: it sent {0:?}")]
    Unexpected(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Proposes one protocol and waits until the other side takes it. After that the stream is the protocol's.
pub(super) async fn propose(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    protocol: &str,
) -> Result<(), NegotiationError> {
    // Both lines at once, which saves a round trip.
    stream.write_all(&[line(VERSION), line(protocol)].concat()).await?;
    stream.flush().await?;
    let version = read_line(stream).await?;
    if version != VERSION {
        return Err(NegotiationError::Unexpected(version));
    }
    let answer = read_line(stream).await?;
    if answer == protocol {
        Ok(())
    } else if answer == NOT_AVAILABLE {
        Err(NegotiationError::NotAvailable(protocol.to_owned()))
    } else {
        Err(NegotiationError::Unexpected(answer))
    }
}

fn line(text: &str) -> Vec<u8> {
    let length = text.len() + 1;
    assert!(length <= LINE_BYTES_MAX, "names of protocols are short");
    let mut line = match u8::try_from(length) {
        Ok(length @ ..0x80) => vec![length],
        _ => vec![length as u8 | 0x80, (length >> 7) as u8],
    };
    line.extend_from_slice(text.as_bytes());
    line.push(b'\n');
    line
}

/// The text of a line, without its end.
async fn read_line(stream: &mut (impl AsyncRead + Unpin)) -> Result<String, NegotiationError> {
    let mut length = usize::from(stream.read_u8().await?);
    if length >= 0x80 {
        length = (length & 0x7f) | usize::from(stream.read_u8().await?) << 7;
    }
    if !(1..=LINE_BYTES_MAX).contains(&length) {
        return Err(NegotiationError::Unexpected(format!("a line of {length} bytes")));
    }
    let mut line = vec![0; length];
    stream.read_exact(&mut line).await?;
    let text = String::from_utf8_lossy(&line).into_owned();
    text.strip_suffix('\n').map(str::to_owned).ok_or(NegotiationError::Unexpected(text.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn propose_to(answer: &[u8]) -> Result<(), NegotiationError> {
        let (mut ours, mut theirs) = tokio::io::duplex(4096);
        theirs.write_all(answer).await.unwrap();
        theirs.shutdown().await.unwrap();
        let result = propose(&mut ours, "DHTProtocol.rpc_find").await;
        drop(ours);
        let mut sent = Vec::new();
        theirs.read_to_end(&mut sent).await.unwrap();
        assert_eq!(sent, b"\x13/multistream/1.0.0\n\x15DHTProtocol.rpc_find\n");
        result
    }

    #[tokio::test]
    async fn a_protocol_is_taken_or_refused() {
        use NegotiationError::{Io, NotAvailable, Unexpected};
        const VERSION: &[u8] = b"\x13/multistream/1.0.0\n";
        let answer = |line: &[u8]| [VERSION, line].concat();
        propose_to(&answer(b"\x15DHTProtocol.rpc_find\n")).await.unwrap();
        assert!(matches!(propose_to(&answer(b"\x03na\n")).await, Err(NotAvailable(_))));
        for wrong in
            [&b"\x0e/noise/1.0.0\n\n"[..], b"\x00", b"\xff\xff", b"\x02na", &answer(b"\x15DHTProtocol.rpc_ping\n")]
        {
            assert!(matches!(propose_to(wrong).await, Err(Unexpected(_))), "{wrong:?}");
        }
        assert!(matches!(propose_to(b"\x13/multi").await, Err(Io(_))));
    }
}
