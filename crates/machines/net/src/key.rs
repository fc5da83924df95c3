//! `ClusterKey`: the secret that the machines of a cluster share.
//!
//! Whoever has one message of a handshake can try keys on it without asking anybody: everybody who hears a connection begin, and
//! everybody to whom a machine connects. So a key that can be guessed is refused, and each guess is made expensive.

use std::fmt;

/// The shortest passphrase, in bytes. Better random than memorable.
pub const PASSPHRASE_BYTES_MIN: usize = 16;
/// Of a passphrase, so many characters are neither a repetition, nor the next or the one before in the alphabet, nor part of a
/// word that everybody tries first,
const SURPRISING_CHARS_MIN: usize = 10;
/// and so many are different.
const DISTINCT_CHARS_MIN: usize = 6;
/// Words that everybody tries first. Each counts as one character.
const COMMON_WORDS: [&str; 12] = [
    "password",
    "passwort",
    "consort",
    "cluster",
    "secret",
    "changeme",
    "letmein",
    "welcome",
    "admin",
    "qwertyuiop",
    "qwerty",
    "asdfgh",
];

const CONTEXT: &str = "consort cluster key from a passphrase, version 2";
/// What a guess costs: memory of so many blocks, all of which are written and then read in an order that depends on the
/// passphrase (scrypt's ROMix, with BLAKE3 as its function).
const STRETCH_BLOCKS: usize = 2048;
const STRETCH_BLOCK_BYTES: usize = 4096;

/// Why a passphrase is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WeakPassphrase {
    #[error("it has {bytes} bytes, and {PASSPHRASE_BYTES_MIN} are the least")]
    Short { bytes: usize },
    #[error("it is a repetition, a sequence, or made of words that everybody tries first")]
    Guessable,
}

#[derive(Clone)]
pub struct ClusterKey([u8; 32]);

impl ClusterKey {
    /// White space around the passphrase does not count: it often comes from a file. Takes some 20 ms.
    pub fn from_passphrase(passphrase: &str) -> Result<Self, WeakPassphrase> {
        check_passphrase(passphrase)?;
        Ok(Self(stretch(blake3::derive_key(CONTEXT, passphrase.trim().as_bytes()))))
    }

    /// A key of random bytes, for one purpose.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Without the key.
impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey")
    }
}

/// Fails if a passphrase is one of those that are easily guessed. That it passes does not make it a good one.
pub fn check_passphrase(passphrase: &str) -> Result<(), WeakPassphrase> {
    let passphrase = passphrase.trim();
    if passphrase.len() < PASSPHRASE_BYTES_MIN {
        return Err(WeakPassphrase::Short { bytes: passphrase.len() });
    }
    // A character that no word has stands for each word.
    let words = (0_u32..).filter_map(char::from_u32).zip(COMMON_WORDS);
    let text =
        words.fold(passphrase.to_lowercase(), |text, (stand_in, word)| text.replace(word, &stand_in.to_string()));
    let chars: Vec<char> = text.chars().collect();
    let is_period = |period: usize| (period..chars.len()).all(|at| chars[at] == chars[at - period]);
    let unit = &chars[..(1..chars.len()).find(|&period| is_period(period)).unwrap_or(chars.len())];
    let is_step = |pair: &[char]| u32::from(pair[0]).abs_diff(u32::from(pair[1])) <= 1;
    let surprising = unit.len() - unit.windows(2).filter(|pair| is_step(pair)).count();
    let mut distinct = unit.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let is_weak = surprising < SURPRISING_CHARS_MIN || distinct.len() < DISTINCT_CHARS_MIN;
    if is_weak { Err(WeakPassphrase::Guessable) } else { Ok(()) }
}

/// Makes each guess cost memory and time.
fn stretch(seed: [u8; 32]) -> [u8; 32] {
    let mut blocks = vec![0; STRETCH_BLOCKS * STRETCH_BLOCK_BYTES];
    let mut state = seed;
    let next = |state: &[u8; 32], block: &mut [u8]| blake3::Hasher::new_keyed(state).finalize_xof().fill(block);
    for block in blocks.chunks_exact_mut(STRETCH_BLOCK_BYTES) {
        next(&state, block);
        state = *blake3::keyed_hash(&state, block).as_bytes();
    }
    for _ in 0..STRETCH_BLOCKS {
        let [a, b, ..] = state;
        let start = usize::from(u16::from_le_bytes([a, b])) % STRETCH_BLOCKS * STRETCH_BLOCK_BYTES;
        state = *blake3::keyed_hash(&state, &blocks[start..start + STRETCH_BLOCK_BYTES]).as_bytes();
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_passphrase_is_refused_and_white_space_does_not_count() {
        let weak = ClusterKey::from_passphrase(" too short      \n").unwrap_err();
        assert_eq!(weak, WeakPassphrase::Short { bytes: 9 });
        let key = |passphrase| ClusterKey::from_passphrase(passphrase).unwrap();
        assert_eq!(key("a passphrase for tests").0, key("a passphrase for tests\n").0);
        assert_ne!(key("a passphrase for tests").0, key("a passphrase for text").0);
        assert_eq!(format!("{:?}", key("a passphrase for tests")), "ClusterKey");
    }

    #[test]
    fn what_everybody_tries_first_is_refused() {
        for weak in [
            "aaaaaaaaaaaaaaaaaaaa",
            "0123456789abcdefghij",
            "1234567890123456789012345678901234567890",
            "abcabcabcabcabcabcabc",
            "PasswordPassword1",
            "consort-cluster-secret",
            "qwertyuiopasdfghjkl",
            "9876543210987654",
            "0000000000000001",
            "changeme changeme changeme",
            "ababababcdcdcdcd",
        ] {
            assert_eq!(check_passphrase(weak), Err(WeakPassphrase::Guessable), "{weak}");
        }
        for good in [
            "a passphrase for tests",
            "another passphrase",
            "three owls count rainy roofs",
            "9f3c1be2747a1d5588e0b2c6a9d4f7031c25e8ab",
            "4839201758 2046 91",
        ] {
            assert_eq!(check_passphrase(good), Ok(()), "{good}");
        }
    }
}
