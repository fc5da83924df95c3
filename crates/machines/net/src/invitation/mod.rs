//! Invitations: a machine without the cluster's key gets it from one that has it, with a code of six digits that a person
//! reads there and types here.
//!
//! # The exchange
//!
//! 1. The joiner sends a frame: protocol, version, a nonce, its name and its element of a password-authenticated key exchange
//!    (SPAKE2) with the code as the password.
//! 2. The inviter takes one of its tries away, whatever follows, and sends such a frame of its own.
//! 3. Both derive a session key from the secret of SPAKE2 and both frames. It is the key of an ordinary handshake
//!    ([`dial`](crate::dial), [`respond`](crate::respond)), which confirms it on both sides, the joiner's first.
//! 4. The inviter sends the text of the cluster's key as an encrypted record; the joiner confirms that it has kept it.
//!
//! # What an attacker can do
//!
//! Who listens learns nothing about the code: a guess cannot be checked against what was sent, at no time. Who takes part, as
//! either side, can try one code with each exchange, and the inviter ends after [`TRIES_MAX`] of them. So a cluster's key falls
//! to an attacker with a probability of three in a million for each invitation. An attacker can also use up the tries or keep
//! the inviter busy; then the person makes another invitation.
//!
//! One connection is served at a time, for [`EXCHANGE_TIME_MAX`] at most. Frames have a limit. An invitation is for one machine:
//! the first one that knew the code ends it.

mod code;
mod frame;
mod inviter;
mod joiner;
mod pake;
#[cfg(test)]
mod tests;

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use crate::hello::{Hello, PARAMETER_BYTES, Purpose};
use crate::noise::{LENGTH_BYTES, RecordDecryptor, RecordEncryptor, TAG_BYTES};
use crate::wait_limit::WaitLimit;

pub use code::{CODE_DIGITS, InvalidCode, InvitationCode};
pub use frame::MACHINE_NAME_BYTES_MAX;
pub use inviter::{FailedTry, InvalidInvitation, Invitation, InvitationEnd, TryFailure};
pub use joiner::{JoinError, ReceivedKey, accept_invitation};

/// Where invitations are open unless another port is chosen.
pub const INVITATION_PORT: u16 = 7421;
/// Exchanges that an invitation allows.
pub const TRIES_MAX: u8 = 3;
/// How long one exchange may take. Both sides are programs: people have typed the code before.
pub const EXCHANGE_TIME_MAX: Duration = Duration::from_secs(10);
/// How long the joiner may take for its first frame.
const FIRST_FRAME_TIME_MAX: Duration = Duration::from_secs(3);
/// The longest text of a key that is handed over.
pub const KEY_TEXT_BYTES_MAX: usize = 4096;

/// The joiner has kept the key.
const KEPT: u8 = 1;

/// The hello of the handshake. All that is special to an exchange is in its key.
const HELLO: Hello =
    Hello { purpose: Purpose(16), parameters: [0; PARAMETER_BYTES], silence: crate::handshake::SILENCE_MIN };

fn write_record(
    stream: &TcpStream,
    sealer: &mut RecordEncryptor,
    plain: &[u8],
    limit: &WaitLimit<'_>,
) -> io::Result<()> {
    let mut record = vec![0; LENGTH_BYTES + plain.len() + TAG_BYTES];
    let bytes = sealer.seal(plain, &mut record);
    limit.write_all(stream, &record[..bytes])
}

/// Reads a record of at most `plain_bytes_max`.
fn read_record(
    stream: &TcpStream,
    opener: &mut RecordDecryptor,
    plain_bytes_max: usize,
    limit: &WaitLimit<'_>,
) -> io::Result<Vec<u8>> {
    let mut length = [0; LENGTH_BYTES];
    limit.read_exact(stream, &mut length)?;
    let bytes = usize::from(u16::from_le_bytes(length));
    if bytes > plain_bytes_max + TAG_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; bytes];
    limit.read_exact(stream, &mut message)?;
    let mut plain = vec![0; bytes];
    let bytes =
        opener.open(&message, &mut plain).map_err(|forged| io::Error::new(io::ErrorKind::InvalidData, forged))?;
    plain.truncate(bytes);
    Ok(plain)
}
