//! Removes paths of this machine from what clients may read. The log has them.

/// What may stand before a path, besides white space.
const OPENING: [char; 9] = ['"', '\'', '`', '(', '[', '{', '<', '=', ':'];
const QUOTES: [char; 3] = ['"', '\'', '`'];
/// What ends a path without quotes. Spaces may be part of it, so what follows a path up to here is removed with it.
const ENDS: [&str; 6] = [": ", "\n", ")", "\"", "`", ">"];

/// The text, with `…` instead of each absolute path.
pub fn without_paths(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(start) = path_start(rest) {
        let (before, path) = rest.split_at(start);
        let end = match before.chars().next_back().filter(|last| QUOTES.contains(last)) {
            Some(quote) => closing_quote(path, quote),
            None => ENDS.iter().filter_map(|end| path.find(end)).min(),
        };
        out = out + before + "…";
        rest = &path[end.unwrap_or(path.len())..];
    }
    out + rest
}

/// An apostrophe within a word closes nothing.
fn closing_quote(path: &str, quote: char) -> Option<usize> {
    let mut quotes = path.match_indices(quote).map(|(at, _)| at);
    quotes.find(|at| !path[at + quote.len_utf8()..].starts_with(char::is_alphanumeric))
}

/// Where the first path begins: at a `/` that begins a word and is followed by a part of a name. A fraction, or `/` between
/// spaces, is no path.
fn path_start(text: &str) -> Option<usize> {
    let begins = |at: usize| {
        let before = text[..at].chars().next_back();
        let after = text[at..].trim_start_matches('/').chars().next();
        before.is_none_or(|before| before.is_whitespace() || OPENING.contains(&before))
            && after.is_some_and(|after| after.is_alphanumeric() || "._-~".contains(after))
    };
    text.match_indices('/').map(|(at, _)| at).find(|&at| begins(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_paths_are_removed_and_all_else_stays() {
        for (text, expected) in [
            ("rank 1: it failed: open /srv/models/x.gguf: no such file", "rank 1: it failed: open …: no such file"),
            ("open \"/srv/a b\"\n(/etc/x)", "open \"…\"\n(…)"),
            ("open '/srv/it: a b' or `/c d`: no", "open '…' or `…`: no"),
            ("open /srv/my models/x y.gguf: no such file", "open …: no such file"),
            ("open \"/srv/without an end", "open \"…"),
            ("open '/srv/it's mine/x' again", "open '…' again"),
            ("path=/home/me/m at 3", "path=…"),
            ("at 3 of 4 tokens/s, 1/2 / 3, a /", "at 3 of 4 tokens/s, 1/2 / 3, a /"),
            ("rank 2 on 10.0.0.2:7000: it closed its output", "rank 2 on 10.0.0.2:7000: it closed its output"),
            ("", ""),
        ] {
            assert_eq!(without_paths(text), expected);
        }
    }
}
