//! `InvitationCode`: the six digits that a person carries from one machine to the other.

use std::fmt;
use std::io;
use std::str::FromStr;

use rustix::rand::{GetRandomFlags, getrandom};

pub const CODE_DIGITS: usize = 6;
/// All codes are below it.
const CODES: u32 = 10_u32.pow(CODE_DIGITS as u32);

/// `Display` shows it in two groups; `Debug` does not show it.
#[derive(Clone)]
pub struct InvitationCode(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a code has {CODE_DIGITS} digits")]
pub struct InvalidCode;

impl InvitationCode {
    /// Every code with the same probability.
    pub fn random() -> io::Result<Self> {
        // The numbers from here on would make low codes more probable.
        const END: u32 = u32::MAX / CODES * CODES;
        loop {
            let mut bytes = [0; 4];
            // So few bytes are never returned in part.
            getrandom(&mut bytes, GetRandomFlags::empty())?;
            let number = u32::from_ne_bytes(bytes);
            if number < END {
                return Ok(Self(number % CODES));
            }
        }
    }

    /// Six digits without anything between them.
    pub fn digits(&self) -> String {
        format!("{:06}", self.0)
    }
}

/// Spaces and hyphens do not count.
impl FromStr for InvitationCode {
    type Err = InvalidCode;

    fn from_str(text: &str) -> Result<Self, InvalidCode> {
        let digits: String = text.chars().filter(|c| !c.is_whitespace() && *c != '-').collect();
        let is_code = digits.len() == CODE_DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
        digits.parse().ok().filter(|_| is_code).map(Self).ok_or(InvalidCode)
    }
}

impl fmt::Display for InvitationCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:03} {:03}", self.0 / 1000, self.0 % 1000)
    }
}

impl fmt::Debug for InvitationCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InvitationCode")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_code_is_read_as_people_write_it() {
        for text in ["012345", "012 345", "012-345\n", " 0 1 2 3 4 5 "] {
            let code: InvitationCode = text.parse().unwrap();
            assert_eq!((code.digits().as_str(), code.to_string().as_str()), ("012345", "012 345"));
            assert_eq!(format!("{code:?}"), "InvitationCode");
        }
        for text in ["", "12345", "1234567", "+12345", "12345a", "１２３４５６"] {
            assert_eq!(text.parse::<InvitationCode>().err(), Some(InvalidCode), "{text}");
        }
    }

    #[test]
    fn random_codes_differ() {
        let codes: HashSet<_> = (0..100).map(|_| InvitationCode::random().unwrap().digits()).collect();
        assert!(codes.len() > 90 && codes.iter().all(|code| code.len() == CODE_DIGITS), "{codes:?}");
    }
}
