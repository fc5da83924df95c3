//! Text from outside in logs and error messages, cut so that a client cannot fill the log or have a long body sent back.

use std::borrow::Cow;

/// Characters of a text from outside that are repeated: a model's name, a path, a field.
pub const EXCERPT_CHARS_MAX: usize = 200;
/// Characters of a whole message, which may repeat text from outside anywhere.
const MESSAGE_CHARS_MAX: usize = 600;

/// The first [`EXCERPT_CHARS_MAX`] characters of a text from outside; `…` stands for the rest.
pub fn excerpt(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(EXCERPT_CHARS_MAX) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
    }
}

/// A message, of which the middle is cut out if it is too long: the beginning and the end say what is wrong, as in serde's
/// "unknown variant `…`, expected `a` or `b`".
pub fn bounded_message(mut message: String) -> String {
    // A character has at least one byte, so a short message is not searched.
    if message.len() <= MESSAGE_CHARS_MAX || message.chars().nth(MESSAGE_CHARS_MAX).is_none() {
        return message;
    }
    let at = |index: Option<(usize, char)>| index.map_or(0, |(at, _)| at);
    let head = at(message.char_indices().nth(EXCERPT_CHARS_MAX));
    let tail = at(message.char_indices().nth_back(MESSAGE_CHARS_MAX - EXCERPT_CHARS_MAX - 1));
    message.replace_range(head..tail, "…");
    message.shrink_to_fit();
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_from_outside_is_cut_at_a_character() {
        assert_eq!(excerpt("gpt-0"), "gpt-0");
        let exact = "ä".repeat(EXCERPT_CHARS_MAX);
        assert_eq!(excerpt(&exact), exact);
        assert_eq!(excerpt(&(exact.clone() + "b")), exact + "…");
    }

    #[test]
    fn a_long_message_keeps_its_beginning_and_its_end() {
        let exact = "é".repeat(MESSAGE_CHARS_MAX);
        assert_eq!(bounded_message(exact.clone()), exact);
        let message = format!("unknown variant `{}`, expected `user`", "é".repeat(1 << 20));
        let cut = bounded_message(message);
        assert_eq!(cut.chars().count(), MESSAGE_CHARS_MAX + 1);
        assert!(cut.starts_with("unknown variant `é") && cut.contains("é…é") && cut.ends_with("`, expected `user`"));
    }
}
