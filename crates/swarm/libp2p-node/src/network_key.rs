//! `NetworkKey`: the pre-shared key of a private swarm. Without it nothing of the network can be read or dialled.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::path::Path;
use std::str::FromStr;

use libp2p_pnet::PreSharedKey;

use crate::error::NetworkKeyError;

const KEY_BYTES: usize = 32;
/// libp2p's key file has two lines before the key.
const FILE_BYTES_MAX: u64 = 256;

#[derive(Clone)]
pub struct NetworkKey([u8; KEY_BYTES]);

impl NetworkKey {
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(bytes)
    }

    /// A file with 64 hexadecimal digits. libp2p's `swarm.key`, where two lines come before them, is read too.
    pub fn read(path: &Path) -> Result<Self, NetworkKeyError> {
        let failed = |source| NetworkKeyError::Io { path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).open(path).map_err(failed)?;
        let mut text = String::new();
        file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(failed(io::ErrorKind::FileTooLarge.into()));
        }
        text.parse()
    }

    pub(crate) fn pre_shared(&self) -> PreSharedKey {
        PreSharedKey::new(self.0)
    }
}

impl FromStr for NetworkKey {
    type Err = NetworkKeyError;

    fn from_str(text: &str) -> Result<Self, NetworkKeyError> {
        let text = text.trim();
        let digits = text.strip_prefix("/key/swarm/psk/1.0.0/").map_or(text, |rest| {
            let rest = rest.trim_start();
            rest.strip_prefix("/base16/").map_or(rest, str::trim_start)
        });
        decode(digits).map(Self).ok_or(NetworkKeyError::Text)
    }
}

fn decode(digits: &str) -> Option<[u8; KEY_BYTES]> {
    if digits.len() != 2 * KEY_BYTES || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; KEY_BYTES];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(bytes)
}

impl fmt::Debug for NetworkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NetworkKey(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts of pieces that mean something, in every order, with characters of several bytes between.
    #[test]
    fn any_text_is_a_key_of_64_digits_or_is_refused() {
        let digits = "0123456789abcdefABCDEF0123456789".repeat(2);
        let pieces = ["/key/swarm/psk/1.0.0/", "/base16/", "\n", " ", "é", "0", &digits[..63], &digits, "/bin/", "\0"];
        let mut keys = 0;
        for number in 0..pieces.len().pow(4) {
            let text: String = (0..4).map(|place| pieces[number / pieces.len().pow(place) % pieces.len()]).collect();
            if let Ok(key) = text.parse::<NetworkKey>() {
                keys += 1;
                let found: String = key.0.iter().map(|byte| format!("{byte:02x}")).collect();
                let letters: String = text.split_whitespace().next_back().unwrap().to_lowercase();
                assert!(letters.ends_with(&found), "{text:?}");
            }
        }
        assert!(keys > 10, "{keys}");
    }
}
