//! Removes paths of this machine from what clients may read. The log has them.

/// What may stand before a path within a word.
const OPENING: [char; 9] = ['"', '\'', '`', '(', '[', '{', '<', '=', ':'];
/// What may stand after a path within a word.
const CLOSING: [char; 9] = ['"', '\'', '`', ')', ']', '}', '>', ':', ','];

/// The text, with `…` instead of each absolute path.
pub fn without_paths(text: &str) -> String {
    text.split_inclusive(char::is_whitespace).map(without_path).collect()
}

fn without_path(word: &str) -> String {
    let (word, space) = word.split_at(word.trim_end().len());
    let begins = |(at, _): &(usize, &str)| *at == 0 || word[..*at].ends_with(OPENING);
    let Some((at, _)) = word.match_indices('/').find(begins) else { return format!("{word}{space}") };
    let path = word[at..].trim_end_matches(CLOSING);
    // A fraction, a route such as `/` or a comment is no path.
    if !path.contains(char::is_alphanumeric) {
        return format!("{word}{space}");
    }
    format!("{}…{}{space}", &word[..at], &word[at + path.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_paths_are_removed_and_all_else_stays() {
        for (text, expected) in [
            ("rank 1: it failed: open /srv/models/x.gguf: no such file", "rank 1: it failed: open …: no such file"),
            ("open \"/srv/a b\"\n(/etc/x)", "open \"… b\"\n(…)"),
            ("path=/home/me/m at 3 of 4 tokens/s, 1/2 / 3", "path=… at 3 of 4 tokens/s, 1/2 / 3"),
            ("rank 2 on 10.0.0.2:7000: it closed its output", "rank 2 on 10.0.0.2:7000: it closed its output"),
            ("", ""),
        ] {
            assert_eq!(without_paths(text), expected);
        }
    }
}
