//! Messages of several lines: `"""` opens and closes a block, and a backslash at the end of a line continues it.

const QUOTES: &str = "\"\"\"";

/// Whether a block was opened and not closed, so that Enter makes a new line. The text of a command may be a block.
pub fn is_open(text: &str) -> bool {
    block(text).is_some_and(|rest| !rest.contains(QUOTES))
}

/// Whether a line ends with a backslash that continues it. Two backslashes are text.
pub fn is_continued(text: &str) -> bool {
    text.ends_with('\\') && !text.ends_with("\\\\")
}

/// The text in a block; `None` if the text is none, or has more than one.
pub fn unquoted(text: &str) -> Option<&str> {
    let (inner, rest) = text.trim().strip_prefix(QUOTES)?.split_once(QUOTES)?;
    rest.is_empty().then(|| inner.trim_matches(['\r', '\n']))
}

/// What follows the quotes that open a block.
fn block(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let argument = match text.starts_with('/') {
        true => text.split_once(char::is_whitespace)?.1.trim_start(),
        false => text,
    };
    argument.strip_prefix(QUOTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_open_until_its_second_quotes() {
        for text in ["\"\"\"", " \"\"\"a", "\"\"\"a\nb\n", "/system \"\"\"a", "\"\"\"a\"\""] {
            assert!(is_open(text) && unquoted(text).is_none(), "{text}");
        }
        for text in ["", "a \"\"\"b", "\"\"\"a\"\"\"", "\"\"\"doc\"\"\"\ncode", "/system", "\"\"a"] {
            assert!(!is_open(text), "{text}");
        }
    }

    #[test]
    fn a_message_is_what_is_between_the_quotes() {
        assert_eq!(unquoted("\"\"\"\n  a\nb\n\"\"\""), Some("  a\nb"));
        assert_eq!(unquoted("\"\"\"a\"\"\" "), Some("a"));
        assert_eq!(unquoted("\"\"\"\"\"\""), Some(""));
        // This is code, not a block.
        assert_eq!(unquoted("\"\"\"doc\"\"\"\ncode"), None);
        assert_eq!(unquoted("plain"), None);
    }

    #[test]
    fn one_backslash_continues_a_line() {
        assert!(is_continued("a\\"));
        assert!(!is_continued("a\\\\") && !is_continued("a") && !is_continued("\\a"));
    }
}
