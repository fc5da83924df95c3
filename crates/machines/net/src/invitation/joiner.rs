//! `accept_invitation`: the side that wants the key.

use std::io;
use std::net::{SocketAddr, TcpStream};

use super::code::InvitationCode;
use super::frame::{ExchangeFrame, FrameError, VERSION, is_name};
use super::inviter::nonce;
use super::pake::CodeExchange;
use super::{EXCHANGE_TIME_MAX, HELLO, KEPT, KEY_TEXT_BYTES_MAX, read_record, write_record};
use crate::handshake::{HandshakeError, SecureStream, initiate};
use crate::hello::RejectReason;
use crate::key::ClusterKey;
use crate::wait_limit::WaitLimit;

#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// `tries_left` is what the other side says.
    #[error("the code is wrong, {}", tries(*tries_left))]
    WrongCode { tries_left: u8 },
    #[error("a machine's name is 1 to {} bytes without control characters", super::MACHINE_NAME_BYTES_MAX)]
    Name,
    #[error("no invitation is open there")]
    NotOpen,
    #[error("the other side does not speak the protocol of invitations")]
    UnknownProtocol,
    #[error("the other side speaks version {theirs} of the protocol of invitations, this build speaks {VERSION}")]
    Version { theirs: u16 },
    #[error("the other side sent something that is no part of the protocol of invitations")]
    Malformed,
    #[error("the connection broke before the key had come")]
    Io(#[source] io::Error),
}

fn tries(left: u8) -> String {
    match left {
        0 => "and it was the last try: ask for another invitation".to_owned(),
        1 => "one try is left".to_owned(),
        left => format!("{left} tries are left"),
    }
}

/// The key that came, and the connection to tell that it is kept.
pub struct ReceivedKey {
    /// What a key file has.
    pub text: String,
    /// The name of the machine that sent it.
    pub inviter: String,
    secure: SecureStream,
}

impl ReceivedKey {
    /// Tells the other side that the key is kept. An error changes nothing on this side.
    pub fn confirm(mut self, limit: &WaitLimit<'_>) -> io::Result<()> {
        write_record(&self.secure.stream, &mut self.secure.sealer, &[KEPT], limit)
    }
}

/// Gets the cluster's key from the machine at `address`, which must have the same code. `name` is what this machine calls itself.
pub fn accept_invitation(
    address: SocketAddr,
    code: &InvitationCode,
    name: &str,
    limit: &WaitLimit<'_>,
) -> Result<ReceivedKey, JoinError> {
    if !is_name(name) {
        return Err(JoinError::Name);
    }
    // The other side serves one connection at a time, each for so long.
    let limit = limit.within(2 * EXCHANGE_TIME_MAX);
    let stream = limit.connect(address).map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused => JoinError::NotOpen,
        _ => JoinError::Io(error),
    })?;
    exchange(stream, code, name, &limit)
}

fn exchange(
    stream: TcpStream,
    code: &InvitationCode,
    name: &str,
    limit: &WaitLimit<'_>,
) -> Result<ReceivedKey, JoinError> {
    let exchange = CodeExchange::joiner(code);
    let nonce = nonce().map_err(JoinError::Io)?;
    let own_bytes = ExchangeFrame { nonce, tries_left: 0, element: exchange.element, name: name.to_owned() }.bytes();
    limit.write_all(&stream, &own_bytes).map_err(JoinError::Io)?;
    let (theirs, their_bytes) = ExchangeFrame::read(&stream, limit)?;
    let secret = exchange.finish(&theirs.element).map_err(|_| JoinError::Malformed)?;
    let key: ClusterKey = secret.session_key(&own_bytes, &their_bytes);
    let mut secure = initiate(stream, &key, &HELLO, limit).map_err(|error| match error {
        HandshakeError::Key | HandshakeError::RejectedByPeer(RejectReason::Key) => {
            JoinError::WrongCode { tries_left: theirs.tries_left }
        }
        HandshakeError::Io(error) => JoinError::Io(error),
        _ => JoinError::Malformed,
    })?;
    let text = read_record(&secure.stream, &mut secure.opener, KEY_TEXT_BYTES_MAX, limit).map_err(JoinError::Io)?;
    let text = String::from_utf8(text).map_err(|_| JoinError::Malformed)?;
    // Checked here, so that nobody keeps what is no key.
    ClusterKey::from_passphrase(&text).map_err(|_| JoinError::Malformed)?;
    Ok(ReceivedKey { text, inviter: theirs.name, secure })
}

impl From<FrameError> for JoinError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::UnknownProtocol => Self::UnknownProtocol,
            FrameError::Version { theirs } => Self::Version { theirs },
            FrameError::Malformed => Self::Malformed,
            FrameError::Io(error) => Self::Io(error),
        }
    }
}

/// Without the key.
impl std::fmt::Debug for ReceivedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReceivedKey").field("inviter", &self.inviter).finish_non_exhaustive()
    }
}
