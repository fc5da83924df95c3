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

/// When the kernel begins to ask a silent host whether it is there, how often it asks, and how many times in vain.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(5), Duration::from_secs(2), 3);
/// How long sent bytes may stay unacknowledged.
const UNACKNOWLEDGED_MS: u32 = 10_000;

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
    prepare(&stream)?;
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
    prepare(&stream)?;
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

/// Small messages go out at once, and a host that vanishes is noticed by the kernel.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    let (idle, interval, count) = KEEPALIVE;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, idle)?;
    sockopt::set_tcp_keepintvl(stream, interval)?;
    sockopt::set_tcp_keepcnt(stream, count)?;
    Ok(sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED_MS)?)
}
