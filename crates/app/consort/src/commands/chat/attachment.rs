//! Files as parts of a message: `/file F`, and `@F` within the message.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::bounded_file;

/// The longest file, and all files of one message. A context has less.
const FILE_BYTES_MAX: u64 = 1 << 20;
const FILES_BYTES_MAX: usize = 4 << 20;
/// What may follow a reference in a sentence.
const PUNCTUATION: [char; 9] = ['.', ',', ';', ':', '!', '?', ')', ']', '\''];

/// A text file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    name: String,
    text: String,
}

impl Attachment {
    /// Reads a file. The error is a sentence for the user.
    pub fn read(name: &str) -> Result<Self, String> {
        let path = expand_home(name);
        // A pipe would be waited for, and a device may have no end.
        match fs::metadata(&path) {
            Ok(file) if file.is_dir() => return Err(format!("{name} is a folder")),
            Ok(file) if !file.is_file() => return Err(format!("{name} is no ordinary file")),
            Ok(file) if file.len() > FILE_BYTES_MAX => {
                return Err(format!("{name} is longer than {} KiB", FILE_BYTES_MAX >> 10));
            }
            Ok(_) => {}
            Err(error) => return Err(format!("read {name}: {error}")),
        }
        let bytes = bounded_file::read(&path, FILE_BYTES_MAX).map_err(|error| format!("read {name}: {error}"))?;
        let text = String::from_utf8(bytes).map_err(|_| format!("{name} is no text in UTF-8"))?;
        if text.contains('\0') {
            return Err(format!("{name} is no text: it has a zero byte"));
        }
        Ok(Self { name: name.to_owned(), text })
    }

    /// The name and the size, for the user.
    pub fn description(&self) -> String {
        let lines = self.text.lines().count();
        format!("{}, {lines} {}", self.name, if lines == 1 { "line" } else { "lines" })
    }

    /// The file as a paragraph of a message.
    fn paragraph(&self) -> String {
        // Longer than any fence in the text.
        let mut fence = "```".to_owned();
        while self.text.contains(&fence) {
            fence.push('`');
        }
        let end = if self.text.ends_with('\n') { "" } else { "\n" };
        format!("File {}:\n{fence}\n{}{end}{fence}", self.name, self.text)
    }
}

/// A message with the files that it names, after those that were named before.
#[derive(Debug, PartialEq, Eq)]
pub struct Attached {
    pub message: String,
    /// Those that the message names.
    pub files: Vec<Attachment>,
    /// References that are no files, and stay text.
    pub missing: Vec<String>,
}

/// Reads the files that a message names. The error is a sentence for the user.
pub fn attach(message: &str, before: &[Attachment]) -> Result<Attached, String> {
    let mut attached = Attached { message: message.to_owned(), files: Vec::new(), missing: Vec::new() };
    for reference in references(message) {
        let is_file = |name: &&str| expand_home(name).exists();
        let candidates = match reference {
            Reference::Quoted(name) => [name, name],
            Reference::Word(word) => [word, word.trim_end_matches(PUNCTUATION)],
        };
        match (candidates.into_iter().find(is_file), reference) {
            (Some(name), _) if attached.files.iter().chain(before).any(|file| file.name == name) => {}
            (Some(name), _) => attached.files.push(Attachment::read(name)?),
            (None, Reference::Quoted(name)) => return Err(format!("there is no file {name}")),
            (None, Reference::Word(word)) => attached.missing.push(word.to_owned()),
        }
    }
    for file in before.iter().chain(&attached.files) {
        attached.message.push_str("\n\n");
        attached.message.push_str(&file.paragraph());
        if attached.message.len() > FILES_BYTES_MAX {
            return Err(format!("the files are longer than {} MiB together", FILES_BYTES_MAX >> 20));
        }
    }
    Ok(attached)
}

/// Where the path begins of the reference that the cursor is in, for a text that ends at the cursor.
pub fn last_reference(before: &str) -> Option<usize> {
    let at = before.char_indices().rev().find(|&(at, c)| c == '@' && is_word_start(before, at))?.0;
    let path = &before[at + 1..];
    let is_inside = match path.strip_prefix('"') {
        Some(quoted) => !quoted.contains('"'),
        None => !path.contains(char::is_whitespace),
    };
    is_inside.then_some(at + 1)
}

/// A path as an argument: in quotes if it has spaces. The quotes are not closed if more may follow.
pub fn quoted(path: &str, is_whole: bool) -> String {
    match (path.contains(char::is_whitespace), is_whole) {
        (false, _) => path.to_owned(),
        (true, true) => format!("\"{path}\""),
        (true, false) => format!("\"{path}"),
    }
}

/// An argument without its quotes.
pub fn unquoted(argument: &str) -> &str {
    argument.strip_prefix('"').map_or(argument, |rest| rest.strip_suffix('"').unwrap_or(rest))
}

/// There is no shell that would replace `~`.
pub fn expand_home(file: &str) -> PathBuf {
    match (file.strip_prefix("~/"), env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => Path::new(file).to_owned(),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reference<'a> {
    Quoted(&'a str),
    /// The word may end with a punctuation mark of the sentence.
    Word(&'a str),
}

/// What follows each `@` at the start of a word.
fn references(message: &str) -> Vec<Reference<'_>> {
    let starts = message.match_indices('@').filter(|&(at, _)| is_word_start(message, at));
    let reference = |(at, _): (usize, &str)| {
        let rest = &message[at + 1..];
        if let Some((name, _)) = rest.strip_prefix('"').and_then(|quoted| quoted.split_once('"')) {
            return (!name.is_empty() && !name.contains('\n')).then_some(Reference::Quoted(name));
        }
        let word = rest.split(char::is_whitespace).next().unwrap_or_default();
        (!word.trim_end_matches(PUNCTUATION).is_empty()).then_some(Reference::Word(word))
    };
    starts.filter_map(reference).collect()
}

fn is_word_start(text: &str, at: usize) -> bool {
    text[..at].chars().next_back().is_none_or(|c| c.is_whitespace() || matches!(c, '(' | '[' | '\''))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_at_the_start_of_a_word() {
        let check = |message: &str, expected: &[Reference<'_>]| assert_eq!(references(message), expected, "{message}");
        check("what is in @notes.txt?", &[Reference::Word("notes.txt?")]);
        check("@a and (@\"b c.txt\")", &[Reference::Word("a"), Reference::Quoted("b c.txt")]);
        check("me@example.org @ @. a@b", &[]);
    }

    #[test]
    fn a_file_becomes_part_of_the_message() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        fs::write(path("a b.txt"), "one\n```\ntwo").unwrap();
        let attached = attach(&format!("see @\"{}\".", path("a b.txt")), &[]).unwrap();
        let expected = format!("see @\"{0}\".\n\nFile {0}:\n````\none\n```\ntwo\n````", path("a b.txt"));
        assert_eq!(attached.message, expected);
        assert_eq!(attached.files[0].description(), format!("{}, 3 lines", path("a b.txt")));
        // A file that is there already is not attached twice.
        fs::write(path("c"), "x\n").unwrap();
        let before = Attachment::read(&path("c")).unwrap();
        let attached = attach(&format!("@{0} @{0}", path("c")), &[before]).unwrap();
        assert_eq!((attached.message.matches("File ").count(), attached.files.len()), (1, 0));
    }

    #[test]
    fn a_word_that_is_no_file_stays_text() {
        let attached = attach("hello @nobody.", &[]).unwrap();
        assert_eq!((attached.message.as_str(), &attached.missing[..]), ("hello @nobody.", &["nobody.".to_owned()][..]));
        assert_eq!(attach("@\"no such\"", &[]), Err("there is no file no such".to_owned()));
    }

    #[test]
    fn only_bounded_text_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let check = |bytes: &[u8], why: &str| {
            let path = folder.path().join("x").display().to_string();
            fs::write(&path, bytes).unwrap();
            let refused = Attachment::read(&path).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        };
        check(b"\xff\xfe", "is no text in UTF-8");
        check(b"a\0b", "has a zero byte");
        check(&vec![b'a'; FILE_BYTES_MAX as usize + 1], "is longer than 1024 KiB");
        assert!(Attachment::read("/no/where").unwrap_err().starts_with("read /no/where"));
        assert!(Attachment::read("/").unwrap_err().contains("is a folder"));
        assert!(Attachment::read("/dev/zero").unwrap_err().contains("no ordinary file"));
    }

    #[test]
    fn the_reference_at_the_cursor_is_found() {
        assert_eq!(last_reference("see @fo"), Some(5));
        assert_eq!(last_reference("@\"a b"), Some(1));
        assert_eq!(last_reference("@\"a b\" "), None);
        assert_eq!(last_reference("@a b"), None);
        assert_eq!(last_reference("a@b"), None);
    }
}
