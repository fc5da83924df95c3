//! `CodeExchange`: one side of a password-authenticated key exchange (SPAKE2) with the code as the password, and the session key
//! that comes of it.

use spake2::{Ed25519Group, Identity, Password, Spake2};

use super::code::InvitationCode;
use super::frame::ELEMENT_BYTES;
use crate::key::ClusterKey;

const CONTEXT: &str = "consort invitation session key, version 1";
const JOINER: &[u8] = b"consort invitation 1, joiner";
const INVITER: &[u8] = b"consort invitation 1, inviter";

pub(super) struct CodeExchange {
    state: Spake2<Ed25519Group>,
    /// To be sent to the other side.
    pub element: [u8; ELEMENT_BYTES],
}

/// The other side's element is none of the group, or is of the same side.
#[derive(Debug)]
pub(super) struct InvalidElement;

/// What SPAKE2 gave: both sides have the same only if their codes are the same.
pub(super) struct SharedSecret(Vec<u8>);

impl CodeExchange {
    pub fn joiner(code: &InvitationCode) -> Self {
        Self::new(Spake2::start_a(&password(code), &Identity::new(JOINER), &Identity::new(INVITER)))
    }

    pub fn inviter(code: &InvitationCode) -> Self {
        Self::new(Spake2::start_b(&password(code), &Identity::new(JOINER), &Identity::new(INVITER)))
    }

    fn new((state, element): (Spake2<Ed25519Group>, Vec<u8>)) -> Self {
        Self { state, element: element.try_into().expect("an element of the group has this length") }
    }

    pub fn finish(self, theirs: &[u8; ELEMENT_BYTES]) -> Result<SharedSecret, InvalidElement> {
        self.state.finish(theirs).map(SharedSecret).map_err(|_| InvalidElement)
    }
}

impl SharedSecret {
    /// The key of the handshake that follows, bound to both frames: to names, nonces, elements and the version.
    pub fn session_key(&self, joiner_frame: &[u8], inviter_frame: &[u8]) -> ClusterKey {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        for part in [&self.0[..], joiner_frame, inviter_frame] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        ClusterKey::from_bytes(*hasher.finalize().as_bytes())
    }
}

fn password(code: &InvitationCode) -> Password {
    Password::new(code.digits().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> InvitationCode {
        text.parse().unwrap()
    }

    fn keys(joiner: &str, inviter: &str) -> [[u8; 32]; 2] {
        let (joiner, inviter) = (CodeExchange::joiner(&code(joiner)), CodeExchange::inviter(&code(inviter)));
        let elements = [joiner.element, inviter.element];
        let secrets = [joiner.finish(&elements[1]).unwrap(), inviter.finish(&elements[0]).unwrap()];
        secrets.map(|secret| *secret.session_key(b"frame 1", b"frame 2").bytes())
    }

    #[test]
    fn both_sides_have_the_same_key_only_with_the_same_code() {
        let [joiner, inviter] = keys("012345", "012345");
        assert_eq!(joiner, inviter);
        let [joiner, inviter] = keys("012345", "012346");
        assert_ne!(joiner, inviter);
        assert_ne!(keys("012345", "012345"), keys("012345", "012345"), "a code gives another key each time");
    }

    #[test]
    fn a_key_belongs_to_its_frames() {
        let (joiner, inviter) = (CodeExchange::joiner(&code("000000")), CodeExchange::inviter(&code("000000")));
        let secret = joiner.finish(&inviter.element).unwrap();
        let key = |first: &[u8], second: &[u8]| *secret.session_key(first, second).bytes();
        assert_eq!(key(b"a", b"b"), key(b"a", b"b"));
        for (first, second) in [(&b"b"[..], &b"a"[..]), (b"ab", b""), (b"", b"ab"), (b"a", b"c")] {
            assert_ne!(key(b"a", b"b"), key(first, second));
        }
    }

    #[test]
    fn what_is_no_element_of_the_other_side_is_refused() {
        let element = CodeExchange::inviter(&code("000000")).element;
        let finish = |element: &[u8; ELEMENT_BYTES]| CodeExchange::joiner(&code("000000")).finish(element).is_ok();
        assert!(finish(&element));
        // Its own side's.
        assert!(!finish(&CodeExchange::joiner(&code("000000")).element));
        let no_point = (0..=255).map(|byte| {
            let mut altered = element;
            altered[1] = byte;
            finish(&altered)
        });
        assert!(no_point.filter(|is_point| !is_point).count() > 50, "half of all strings are points");
    }
}
