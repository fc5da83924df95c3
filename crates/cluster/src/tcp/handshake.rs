//! The first bytes of a connection, from both sides: the hello, the two messages of Noise, and the caller's confirmation.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use rustix::net::sockopt;

use super::hello::{HELLO_BYTES, Hello, HelloError, Refusal, VERSION};
use super::key::ClusterKey;
use super::noise::{
    Forged, HANDSHAKE_BYTES, Handshake, LENGTH_BYTES, Opener, RECORD_BYTES_MAX, Sealer, TAG_BYTES, split_record,
};
use super::watch::Watch;

/// How long a host may show no sign of life, at least and at most: the kernel asks in whole seconds, and waits for less than
/// ten hours.
pub const SILENCE_MIN: Duration = Duration::from_secs(1);
pub const SILENCE_MAX: Duration = Duration::from_secs(60 * 60);

const ACCEPTED: u8 = 0;
/// The record of nothing.
const CONFIRMATION_BYTES: usize = LENGTH_BYTES + TAG_BYTES;

#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error("the other side does not speak this protocol")]
    Stranger,
    #[error("the other side speaks version {theirs} of this protocol, this build speaks {VERSION}")]
    Version { theirs: u16 },
    #[error("the other side has another key")]
    Key,
    #[error("the other side refused: {0}")]
    Refused(Refusal),
    #[error("this side refused: {0}")]
    Refusing(Refusal),
    #[error("talk to the other side")]
    Io(#[from] io::Error),
}

/// A connection whose two sides know each other.
#[derive(Debug)]
pub(super) struct Secured {
    pub stream: TcpStream,
    pub sealer: Sealer,
    pub opener: Opener,
}

/// From the side that connected.
pub(super) fn call(
    stream: TcpStream,
    key: &ClusterKey,
    hello: &Hello,
    watch: &Watch<'_>,
) -> Result<Secured, HandshakeError> {
    stream.set_nodelay(true)?;
    expect_life(&stream, hello.silence)?;
    let hello = hello.bytes();
    let mut handshake = Handshake::caller(key, &hello);
    watch.write_all(&stream, &[&hello[..], &handshake.write()].concat())?;
    let mut verdict = [0];
    watch.read_exact(&stream, &mut verdict)?;
    if verdict[0] != ACCEPTED {
        return Err(Refusal::parse(verdict[0]).map_or(HandshakeError::Stranger, HandshakeError::Refused));
    }
    let mut message = [0; HANDSHAKE_BYTES];
    watch.read_exact(&stream, &mut message)?;
    handshake.read(&message).map_err(|Forged| HandshakeError::Key)?;
    let (mut sealer, opener) = handshake.finish();
    let mut record = Box::new([0; RECORD_BYTES_MAX]);
    let bytes = sealer.seal(&[], &mut record);
    watch.write_all(&stream, &record[..bytes])?;
    Ok(Secured { stream, sealer, opener })
}

/// From the side that was connected to. `admit` sees a hello only if its sender has the key.
pub(super) fn answer<T>(
    stream: TcpStream,
    key: &ClusterKey,
    watch: &Watch<'_>,
    admit: impl FnOnce(&Hello) -> Result<T, Refusal>,
) -> Result<(T, Secured), HandshakeError> {
    stream.set_nodelay(true)?;
    let (mut hello, mut message) = ([0; HELLO_BYTES], [0; HANDSHAKE_BYTES]);
    let refuse = |refusal: Refusal| {
        // It may have gone; then it needs no reason.
        let _ = watch.write_all(&stream, &[refusal.byte()]);
        HandshakeError::Refusing(refusal)
    };
    watch.read_exact(&stream, &mut hello)?;
    let told = Hello::parse(&hello).map_err(|error| match error {
        HelloError::Stranger => HandshakeError::Stranger,
        HelloError::Version(theirs) => {
            refuse(Refusal::Version);
            HandshakeError::Version { theirs }
        }
    })?;
    watch.read_exact(&stream, &mut message)?;
    let mut handshake = Handshake::called(key, &hello);
    handshake.read(&message).map_err(|Forged| refuse(Refusal::Key))?;
    expect_life(&stream, told.silence)?;
    let admitted = admit(&told).map_err(refuse)?;
    watch.write_all(&stream, &[&[ACCEPTED][..], &handshake.write()].concat())?;
    let (sealer, mut opener) = handshake.finish();
    let (mut record, mut nothing) = ([0; CONFIRMATION_BYTES], [0; TAG_BYTES]);
    watch.read_exact(&stream, &mut record)?;
    match split_record(&record).map(|message| opener.open(message, &mut nothing)) {
        Some(Ok(0)) => Ok((admitted, Secured { stream, sealer, opener })),
        _ => Err(HandshakeError::Key),
    }
}

/// Has the kernel give a connection up when the other host has vanished, about as long after its last sign of life.
fn expect_life(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    let silence = silence.clamp(SILENCE_MIN, SILENCE_MAX);
    // While nothing is sent it asks, first after half of that; how often in vain follows from the limit for unacknowledged bytes.
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, silence / 2)?;
    sockopt::set_tcp_keepintvl(stream, silence / 5)?;
    Ok(sockopt::set_tcp_user_timeout(stream, silence.as_millis() as u32)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use types::Rank;

    use super::super::hello::Purpose;
    use super::*;
    use crate::shared_memory::Epoch;

    /// Unacknowledged milliseconds, and seconds to the first question, of both sides.
    fn expected(silence: Duration) -> [(u32, u64); 2] {
        let key = ClusterKey::from_passphrase("a passphrase for tests").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (purpose, epoch) = (Purpose::Link, Epoch(0));
        let hello = Hello { purpose, from: Rank::SOLO, to: Rank::SOLO, epoch, silence };
        let watch = Watch::new(None, &|| false);
        let [caller, called] = thread::scope(|scope| {
            let caller = scope.spawn(|| {
                let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                call(stream, &key, &hello, &watch).unwrap()
            });
            let ((), called) = answer(listener.accept().unwrap().0, &key, &watch, |_| Ok(())).unwrap();
            [caller.join().unwrap(), called]
        });
        [caller, called].map(|Secured { stream, .. }| {
            assert!(sockopt::socket_keepalive(&stream).unwrap() && stream.nodelay().unwrap());
            (sockopt::tcp_user_timeout(&stream).unwrap(), sockopt::tcp_keepidle(&stream).unwrap().as_secs())
        })
    }

    #[test]
    fn both_sides_expect_the_signs_of_life_that_the_caller_says() {
        assert_eq!(expected(Duration::from_secs(10)), [(10_000, 5); 2]);
        assert_eq!(expected(Duration::from_millis(2500)), [(2500, 2); 2]);
        assert_eq!(expected(Duration::ZERO), [(1000, 1); 2]);
        assert_eq!(expected(Duration::from_secs(1 << 20)), [(3_600_000, 1800); 2]);
    }
}
