//! What a node announces of itself, as the TXT record of its service. Its port is in the SRV record. Nothing in it depends on the
//! cluster key: whoever hears it could try keys on it. To whom a node belongs is known when it is connected.

use std::fmt;
use std::str::FromStr;

/// The longest name of a node: that of a DNS label.
pub const NODE_NAME_BYTES_MAX: usize = 63;

/// Values of the TXT record that are read. Longer ones belong to no node.
const VALUE_BYTES_MAX: usize = 64;

const VERSION: &str = "v";
const NAME: &str = "name";

/// A name for people: 1 to 63 bytes without control characters, and without white space around it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeName(String);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The version of the protocol between machines (`net::VERSION`).
    pub version: u16,
    pub name: NodeName,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAnnouncement {
    #[error("a node's name is 1 to {NODE_NAME_BYTES_MAX} bytes without control characters")]
    Name,
    #[error("the announcement has no valid {0:?}")]
    Field(&'static str),
}

impl Announcement {
    /// The announcement of a machine with this build.
    pub fn new(name: NodeName) -> Self {
        Self { version: net::VERSION, name }
    }

    /// Keys and values of the TXT record.
    pub fn txt(&self) -> [(&'static str, String); 2] {
        [(VERSION, self.version.to_string()), (NAME, self.name.as_str().to_owned())]
    }

    /// Reads the values of a TXT record, which `value` returns by key.
    pub fn from_txt<'a>(value: impl Fn(&'static str) -> Option<&'a [u8]>) -> Result<Self, InvalidAnnouncement> {
        let text = |key: &'static str| txt_text(&value, key);
        let version = text(VERSION)?;
        let digits = !version.is_empty() && version.bytes().all(|byte| byte.is_ascii_digit());
        let version = version.parse().ok().filter(|_| digits).ok_or(InvalidAnnouncement::Field(VERSION))?;
        Ok(Self { version, name: text(NAME)?.parse()? })
    }
}

/// A value of a TXT record, which `value` returns by key.
pub(super) fn txt_text<'a>(
    value: impl Fn(&'static str) -> Option<&'a [u8]>,
    key: &'static str,
) -> Result<&'a str, InvalidAnnouncement> {
    let bytes = value(key).filter(|bytes| bytes.len() <= VALUE_BYTES_MAX);
    bytes.and_then(|bytes| str::from_utf8(bytes).ok()).ok_or(InvalidAnnouncement::Field(key))
}

impl NodeName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for NodeName {
    type Err = InvalidAnnouncement;

    fn from_str(text: &str) -> Result<Self, InvalidAnnouncement> {
        let length = (1..=NODE_NAME_BYTES_MAX).contains(&text.len());
        match length && text.trim() == text && !text.chars().any(char::is_control) {
            true => Ok(Self(text.to_owned())),
            false => Err(InvalidAnnouncement::Name),
        }
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn announcement() -> Announcement {
        Announcement::new("kitchen pi".parse().unwrap())
    }

    fn read(fields: &[(&'static str, Vec<u8>)]) -> Result<Announcement, InvalidAnnouncement> {
        Announcement::from_txt(|key| fields.iter().find(|(other, _)| *other == key).map(|(_, value)| value.as_slice()))
    }

    fn written() -> Vec<(&'static str, Vec<u8>)> {
        announcement().txt().map(|(key, value)| (key, value.into_bytes())).to_vec()
    }

    #[test]
    fn an_announcement_reads_back() {
        assert_eq!(read(&written()), Ok(announcement()));
    }

    #[test]
    fn what_no_node_announces_is_refused() {
        let check = |index: usize, value: &[u8], expected| {
            let mut fields = written();
            fields[index].1 = value.to_vec();
            assert_eq!(read(&fields), Err(expected), "{}", value.escape_ascii());
        };
        let long = "a".repeat(NODE_NAME_BYTES_MAX + 1);
        for name in ["", " a", "a\n", "a\u{1b}[31m", &long] {
            check(1, name.as_bytes(), InvalidAnnouncement::Name);
        }
        check(1, b"\xff", InvalidAnnouncement::Field("name"));
        check(1, &[b'a'; 1000], InvalidAnnouncement::Field("name"));
        for version in [&b""[..], b"-1", b"+1", b"65536", b"x"] {
            check(0, version, InvalidAnnouncement::Field("v"));
        }
        for missing in 0..2 {
            let mut fields = written();
            fields.remove(missing);
            assert!(read(&fields).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_values_are_an_announcement_or_an_error(
            values in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..80), 2), keep in 0..4usize,
        ) {
            let mut fields = written();
            for (index, value) in values.into_iter().enumerate() {
                if keep >> index & 1 == 0 {
                    fields[index].1 = value;
                }
            }
            if let Ok(announcement) = read(&fields) {
                let again = announcement.txt().map(|(key, value)| (key, value.into_bytes()));
                prop_assert_eq!(read(&again), Ok(announcement));
            }
        }
    }
}
