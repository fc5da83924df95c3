//! The first bytes of a connection, on both sides: the hello, the two Noise messages, and the initiator's confirmation.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::sockopt;

use crate::hello::{HELLO_BYTES, Hello, HelloError, MAGIC, RejectReason, VERSION};
use crate::key::ClusterKey;
use crate::noise::{
    Forged, HANDSHAKE_BYTES, Handshake, LENGTH_BYTES, RecordDecryptor, RecordEncryptor, TAG_BYTES, split_record,
};
use crate::wait_limit::WaitLimit;

/// Limits of the silence deadline: TCP keepalive counts in whole seconds, up to less than ten hours.
pub const SILENCE_MIN: Duration = Duration::from_secs(1);
pub const SILENCE_MAX: Duration = Duration::from_secs(60 * 60);

const ACCEPTED: u8 = 0;
/// The last version that refuses another without saying its own.
const VERSION_UNSAID: u16 = 4;
/// A peer that is refused before it was heard out may send so many more bytes, for so long: with bytes unread, the connection
/// would be reset and the refusal lost.
const UNHEARD_BYTES_MAX: usize = 1 << 10;
const UNHEARD_WAIT: Duration = Duration::from_secs(1);
/// A record with an empty payload.
const CONFIRMATION_BYTES: usize = LENGTH_BYTES + TAG_BYTES;

#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error("the other side does not speak this protocol")]
    UnknownProtocol,
    #[error("the other side {}", other_version(*theirs))]
    Version { theirs: u16 },
    #[error("the other side has another cluster key")]
    Key,
    #[error("the other side refused: {0}")]
    RejectedByPeer(RejectReason),
    #[error("this side refused: {0}")]
    Rejected(RejectReason),
    #[error("talk to the other side")]
    Io(#[from] io::Error),
}

/// What to say of a machine that speaks another version of the protocol, after a word for the machine.
pub fn other_version(theirs: u16) -> String {
    let place = if theirs < VERSION { "there" } else { "on this machine" };
    format!(
        "speaks version {theirs} of the protocol between machines, this one speaks {VERSION}: update consort {place}"
    )
}

/// A connection whose two sides have authenticated each other.
#[derive(Debug)]
pub struct SecureStream {
    pub stream: TcpStream,
    pub sealer: RecordEncryptor,
    pub opener: RecordDecryptor,
    /// How long either side may be silent: the hello's, from [`SILENCE_MIN`] to [`SILENCE_MAX`].
    pub silence: Duration,
}

/// One attempt to connect to `address`, with the handshake.
pub fn dial(
    address: SocketAddr,
    key: &ClusterKey,
    hello: &Hello,
    limit: &WaitLimit<'_>,
) -> Result<SecureStream, HandshakeError> {
    initiate(limit.connect(address)?, key, hello, limit)
}

/// The handshake on the side that connected.
pub(crate) fn initiate(
    stream: TcpStream,
    key: &ClusterKey,
    hello: &Hello,
    limit: &WaitLimit<'_>,
) -> Result<SecureStream, HandshakeError> {
    exchange(stream, key, &hello.bytes(), hello.silence, limit)
}

fn exchange(
    stream: TcpStream,
    key: &ClusterKey,
    hello: &[u8; HELLO_BYTES],
    silence: Duration,
    limit: &WaitLimit<'_>,
) -> Result<SecureStream, HandshakeError> {
    stream.set_nodelay(true)?;
    let silence = set_keepalive(&stream, silence)?;
    let mut handshake = Handshake::initiator(key, hello);
    limit.write_all(&stream, &[&hello[..], &handshake.write()].concat())?;
    let mut verdict = [0];
    limit.read_exact(&stream, &mut verdict)?;
    if verdict[0] != ACCEPTED {
        return Err(match RejectReason::parse(verdict[0]) {
            None => HandshakeError::UnknownProtocol,
            Some(RejectReason::Version) => {
                let mut theirs = [0; 2];
                let is_said = limit.read_exact(&stream, &mut theirs).is_ok();
                HandshakeError::Version { theirs: if is_said { u16::from_le_bytes(theirs) } else { VERSION_UNSAID } }
            }
            Some(reason) => HandshakeError::RejectedByPeer(reason),
        });
    }
    let mut message = [0; HANDSHAKE_BYTES];
    limit.read_exact(&stream, &mut message)?;
    handshake.read(&message).map_err(|Forged| HandshakeError::Key)?;
    let (mut sealer, opener) = handshake.finish();
    let mut confirmation = [0; CONFIRMATION_BYTES];
    sealer.seal(&[], &mut confirmation);
    limit.write_all(&stream, &confirmation)?;
    Ok(SecureStream { stream, sealer, opener, silence })
}

/// The handshake on the side that accepted. `admit` gets the hello only if its sender has the key, or repeats what somebody with
/// the key has sent: nothing may be set aside for it before the handshake is complete.
pub fn respond<T>(
    stream: TcpStream,
    key: &ClusterKey,
    limit: &WaitLimit<'_>,
    admit: impl FnOnce(&Hello) -> Result<T, RejectReason>,
) -> Result<(T, SecureStream), HandshakeError> {
    stream.set_nodelay(true)?;
    let (mut hello, mut message) = ([0; HELLO_BYTES], [0; HANDSHAKE_BYTES]);
    let refuse = |reason: RejectReason| {
        // The peer may have disconnected already, so the error is ignored.
        let _ = limit.write_all(&stream, &[reason.byte()]);
        HandshakeError::Rejected(reason)
    };
    let (magic, rest) = hello.split_at_mut(MAGIC.len());
    limit.read_exact(&stream, magic)?;
    // A peer of another protocol may send less than a hello, so it is refused as soon as it can be.
    if magic != MAGIC {
        return Err(HandshakeError::UnknownProtocol);
    }
    limit.read_exact(&stream, rest)?;
    let parsed = Hello::parse(&hello).map_err(|error| match error {
        HelloError::UnknownProtocol => HandshakeError::UnknownProtocol,
        HelloError::Version(theirs) => {
            let [low, high] = VERSION.to_le_bytes();
            // The peer may have disconnected already, so errors are ignored.
            let _ = limit.write_all(&stream, &[RejectReason::Version.byte(), low, high]);
            hear_out(&stream, limit);
            HandshakeError::Version { theirs }
        }
    })?;
    limit.read_exact(&stream, &mut message)?;
    let mut handshake = Handshake::responder(key, &hello);
    handshake.read(&message).map_err(|Forged| refuse(RejectReason::Key))?;
    let silence = set_keepalive(&stream, parsed.silence)?;
    let admitted = admit(&parsed).map_err(refuse)?;
    limit.write_all(&stream, &[&[ACCEPTED][..], &handshake.write()].concat())?;
    let (sealer, mut opener) = handshake.finish();
    let (mut record, mut nothing) = ([0; CONFIRMATION_BYTES], [0; TAG_BYTES]);
    limit.read_exact(&stream, &mut record)?;
    match split_record(&record).map(|message| opener.open(message, &mut nothing)) {
        Some(Ok(0)) => Ok((admitted, SecureStream { stream, sealer, opener, silence })),
        _ => Err(HandshakeError::Key),
    }
}

/// Reads what a peer that was refused still sends.
fn hear_out(stream: &TcpStream, limit: &WaitLimit<'_>) {
    let _ = stream.shutdown(Shutdown::Write);
    let limit = limit.within(UNHEARD_WAIT);
    let mut byte = [0];
    for _ in 0..UNHEARD_BYTES_MAX {
        if limit.read_exact(stream, &mut byte).is_err() {
            return;
        }
    }
}

/// Has the kernel close the connection about `silence` after the last packet from the other host. Returns `silence`
/// within its limits.
fn set_keepalive(stream: &TcpStream, silence: Duration) -> io::Result<Duration> {
    let silence = silence.clamp(SILENCE_MIN, SILENCE_MAX);
    // While the connection is idle, the first probe is sent after half of `silence`. TCP_USER_TIMEOUT sets the limit,
    // also for unacknowledged bytes, so no number of probes is set.
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, silence / 2)?;
    sockopt::set_tcp_keepintvl(stream, silence / 5)?;
    sockopt::set_tcp_user_timeout(stream, silence.as_millis() as u32)?;
    Ok(silence)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::hello::Purpose;

    /// TCP_USER_TIMEOUT in milliseconds and seconds to the first keepalive probe, of both sides.
    fn expected(silence: Duration) -> [(u32, u64); 2] {
        let key = ClusterKey::from_bytes([7; 32]);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let hello = Hello { purpose: Purpose(1), parameters: [0; 10], silence };
        let limit = WaitLimit::new(None, &|| false);
        let [initiator, responder] = thread::scope(|scope| {
            let initiator = scope.spawn(|| dial(listener.local_addr().unwrap(), &key, &hello, &limit).unwrap());
            let ((), responder) = respond(listener.accept().unwrap().0, &key, &limit, |_| Ok(())).unwrap();
            [initiator.join().unwrap(), responder]
        });
        [initiator, responder].map(|SecureStream { stream, silence, .. }| {
            assert!((SILENCE_MIN..=SILENCE_MAX).contains(&silence));
            assert!(sockopt::socket_keepalive(&stream).unwrap() && stream.nodelay().unwrap());
            (sockopt::tcp_user_timeout(&stream).unwrap(), sockopt::tcp_keepidle(&stream).unwrap().as_secs())
        })
    }

    /// Both sides' errors when the initiator's hello has another version.
    fn met(version: u16) -> [HandshakeError; 2] {
        let key = ClusterKey::from_bytes([7; 32]);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let limit = WaitLimit::new(None, &|| false);
        thread::scope(|scope| {
            let initiator = scope.spawn(|| {
                let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                let hello = Hello { purpose: Purpose(1), parameters: [0; 10], silence: SILENCE_MIN };
                let mut bytes = hello.bytes();
                bytes[8..10].copy_from_slice(&version.to_le_bytes());
                exchange(stream, &key, &bytes, SILENCE_MIN, &limit).unwrap_err()
            });
            let responder = respond(listener.accept().unwrap().0, &key, &limit, |_| Ok(())).unwrap_err();
            [initiator.join().unwrap(), responder]
        })
    }

    #[test]
    fn machines_of_different_versions_say_both_and_which_to_update() {
        let text = |version| met(version).map(|error| error.to_string());
        // In this test, only the hello is of another version: the initiator itself speaks this one.
        let said = |place, theirs| {
            format!(
                "speaks version {theirs} of the protocol between machines, this one speaks {VERSION}: update consort {place}"
            )
        };
        for version in [VERSION - 1, VERSION + 1] {
            let [initiator, responder] = text(version);
            assert!(initiator.ends_with(&said("on this machine", VERSION)), "{initiator}");
            let place = if version < VERSION { "there" } else { "on this machine" };
            assert!(responder.ends_with(&said(place, version)), "{responder}");
        }
    }

    #[test]
    fn both_sides_expect_the_signs_of_life_that_the_caller_says() {
        assert_eq!(expected(Duration::from_secs(10)), [(10_000, 5); 2]);
        assert_eq!(expected(Duration::from_millis(2500)), [(2500, 2); 2]);
        assert_eq!(expected(Duration::ZERO), [(1000, 1); 2]);
        assert_eq!(expected(Duration::from_secs(1 << 20)), [(3_600_000, 1800); 2]);
    }
}
