//! `Invitation`: the side that has the key.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};

use rustix::rand::{GetRandomFlags, getrandom};
use tracing::debug;

use super::code::InvitationCode;
use super::frame::{ExchangeFrame, FrameError, is_name, version_notice};
use super::pake::CodeExchange;
use super::{
    EXCHANGE_TIME_MAX, FIRST_FRAME_TIME_MAX, HELLO, KEPT, KEY_TEXT_BYTES_MAX, TRIES_MAX, read_record, write_record,
};
use crate::accept::accept;
use crate::handshake::{HandshakeError, respond};
use crate::hello::RejectReason;
use crate::wait_limit::WaitLimit;

/// The cluster's key for one machine that knows the code.
pub struct Invitation {
    code: InvitationCode,
    key_text: String,
    /// Of this machine.
    name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidInvitation {
    #[error("a machine's name is 1 to {} bytes without control characters", super::MACHINE_NAME_BYTES_MAX)]
    Name,
    #[error("a key that is handed over has at most {KEY_TEXT_BYTES_MAX} bytes")]
    LongKey,
}

/// An exchange that cost a try and gave nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedTry {
    pub address: SocketAddr,
    /// What the machine called itself, which may be wrong.
    pub name: String,
    pub failure: TryFailure,
    pub tries_left: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TryFailure {
    WrongCode,
    /// The connection ended, or took too long, before the code was confirmed. It may have served to try one.
    BrokenOff,
}

/// Why no further machine is let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvitationEnd {
    /// A machine knew the code and was sent the key.
    Joined {
        address: SocketAddr,
        name: String,
        /// It has said that it keeps the key. Otherwise its connection broke after the key was sent, or while it was.
        is_confirmed: bool,
    },
    TooManyTries,
    /// The limit's deadline has passed.
    Expired,
    /// The limit is over.
    Cancelled,
}

/// What became of a connection.
enum Exchange {
    /// It did not come to an exchange, so nothing was risked.
    None,
    Failed {
        name: String,
        failure: TryFailure,
    },
    Done {
        name: String,
        is_confirmed: bool,
    },
}

impl Invitation {
    pub fn new(code: InvitationCode, key_text: &str, name: &str) -> Result<Self, InvalidInvitation> {
        if !is_name(name) {
            return Err(InvalidInvitation::Name);
        }
        if key_text.len() > KEY_TEXT_BYTES_MAX {
            return Err(InvalidInvitation::LongKey);
        }
        Ok(Self { code, key_text: key_text.to_owned(), name: name.to_owned() })
    }

    /// Serves connections, one after the other, until a machine has the key, the tries are used up or `limit` ends. An error
    /// is one of the listener, which is made non-blocking.
    pub fn serve(
        self,
        listener: &TcpListener,
        limit: &WaitLimit<'_>,
        mut failed: impl FnMut(FailedTry),
    ) -> io::Result<InvitationEnd> {
        listener.set_nonblocking(true)?;
        let mut tries_left = TRIES_MAX;
        loop {
            match limit.check() {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::TimedOut => return Ok(InvitationEnd::Expired),
                Err(_) => return Ok(InvitationEnd::Cancelled),
            }
            let Some((stream, _)) = accept(listener)? else { continue };
            // The connection may have ended already.
            let Ok(address) = stream.peer_addr() else { continue };
            match self.exchange(&stream, &mut tries_left, &limit.within(EXCHANGE_TIME_MAX)) {
                Exchange::None => {}
                Exchange::Done { name, is_confirmed } => {
                    return Ok(InvitationEnd::Joined { address, name, is_confirmed });
                }
                Exchange::Failed { name, failure } => {
                    failed(FailedTry { address, name, failure, tries_left });
                    if tries_left == 0 {
                        return Ok(InvitationEnd::TooManyTries);
                    }
                }
            }
        }
    }

    fn exchange(&self, stream: &TcpStream, tries_left: &mut u8, limit: &WaitLimit<'_>) -> Exchange {
        let (theirs, their_bytes) = match ExchangeFrame::read(stream, &limit.within(FIRST_FRAME_TIME_MAX)) {
            Ok(frame) => frame,
            Err(error) => {
                debug!("a connection began no exchange: {error}");
                if matches!(error, FrameError::Version { .. }) {
                    // The peer may have disconnected already, so the error is ignored.
                    let _ = limit.write_all(stream, &version_notice());
                }
                return Exchange::None;
            }
        };
        let exchange = CodeExchange::inviter(&self.code);
        let element = exchange.element;
        let (Ok(secret), Ok(nonce)) = (exchange.finish(&theirs.element), nonce()) else { return Exchange::None };
        // From here on a guess is possible, whether the other side says more or not.
        *tries_left -= 1;
        let own_bytes = ExchangeFrame { nonce, tries_left: *tries_left, element, name: self.name.clone() }.bytes();
        let name = theirs.name;
        if limit.write_all(stream, &own_bytes).is_err() {
            return Exchange::Failed { name, failure: TryFailure::BrokenOff };
        }
        let key = secret.session_key(&their_bytes, &own_bytes);
        let admit = |hello: &crate::hello::Hello| match hello.purpose == HELLO.purpose {
            true => Ok(()),
            false => Err(RejectReason::Purpose),
        };
        let confirmed =
            stream.try_clone().map_err(HandshakeError::from).and_then(|stream| respond(stream, &key, limit, admit));
        match confirmed {
            Ok(((), mut secure)) => {
                let sent = write_record(&secure.stream, &mut secure.sealer, self.key_text.as_bytes(), limit);
                let answer = sent.and_then(|()| read_record(&secure.stream, &mut secure.opener, 1, limit));
                Exchange::Done { name, is_confirmed: answer.is_ok_and(|answer| answer == [KEPT]) }
            }
            Err(HandshakeError::Key | HandshakeError::Rejected(RejectReason::Key)) => {
                Exchange::Failed { name, failure: TryFailure::WrongCode }
            }
            Err(error) => {
                debug!("an exchange broke off: {error}");
                Exchange::Failed { name, failure: TryFailure::BrokenOff }
            }
        }
    }
}

/// Fresh in each frame, so that no exchange is like another one.
pub(super) fn nonce() -> io::Result<[u8; 16]> {
    let mut nonce = [0; 16];
    // So few bytes are never returned in part.
    getrandom(&mut nonce, GetRandomFlags::empty())?;
    Ok(nonce)
}
