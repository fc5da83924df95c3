//! Text from other machines, as clients, logs and metrics get it: short, and on one line.

use crate::excerpt::excerpt;
use crate::redact::without_paths;

/// Characters of a machine's name.
const NAME_CHARS_MAX: usize = 64;
/// Characters of an address; a multiaddress through a relay has two ids of peers.
const ADDRESS_CHARS_MAX: usize = 256;

/// A name without control characters, cut to a length that a label of a metric may have.
pub fn bounded_name(name: &str) -> String {
    name.chars().take(NAME_CHARS_MAX).map(visible).collect()
}

pub fn bounded_address(address: &str) -> String {
    address.chars().take(ADDRESS_CHARS_MAX).map(visible).collect()
}

/// Why something failed, as another machine may have said it.
pub fn bounded_reason(why: &str) -> String {
    excerpt(&without_paths(&excerpt(why))).chars().map(visible).collect()
}

/// Control characters, and those that change the direction of a text, become a replacement character.
fn visible(letter: char) -> char {
    let turns = matches!(letter, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if letter.is_control() || turns { char::REPLACEMENT_CHARACTER } else { letter }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_reasons_are_short_and_on_one_line() {
        for (name, expected) in [
            ("attic", "attic"),
            ("küche 2", "küche 2"),
            ("a\nb\"c\\", "a\u{fffd}b\"c\\"),
            ("\u{202e}evil\u{1b}[31m", "\u{fffd}evil\u{fffd}[31m"),
        ] {
            assert_eq!(bounded_name(name), expected);
        }
        assert_eq!(bounded_name(&"ä".repeat(1 << 20)).chars().count(), NAME_CHARS_MAX);
        assert_eq!(bounded_reason("open /srv/secret: no\nroom"), "open …: no\u{fffd}room");
        assert!(bounded_reason(&"x".repeat(1 << 20)).len() < 1000);
    }
}
