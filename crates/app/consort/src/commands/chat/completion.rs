//! What Tab completes: commands, their arguments, and files after `@`.

use std::fs;
use std::path::Path;

use rustyline::completion::{Completer, Pair};
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Context, Helper};

use super::attachment;
use super::command;
use super::multi_line;
use super::settings;
use crate::store::Store;

/// Entries of a folder that are looked at.
const FOLDER_ENTRIES_MAX: usize = 10_000;

/// Where the names of models come from.
pub enum ModelNames {
    /// What is on this machine.
    Store,
    Listed(Vec<String>),
}

impl ModelNames {
    /// The names; none if the store cannot be read.
    pub fn names(&self) -> Vec<String> {
        match self {
            Self::Listed(names) => names.clone(),
            Self::Store => {
                let stored = Store::from_environment().and_then(|store| store.list()).unwrap_or_default();
                stored.into_iter().filter(|model| model.complete).map(|model| model.name).collect()
            }
        }
    }
}

/// What the line editor asks while a line is edited.
pub struct ChatHelper {
    pub models: ModelNames,
}

impl ChatHelper {
    pub fn new() -> Self {
        Self { models: ModelNames::Listed(Vec::new()) }
    }

    /// Where the word before the cursor begins, and what may replace it.
    fn candidates(&self, before: &str) -> (usize, Vec<Pair>) {
        if let Some((name, argument)) = argument(before) {
            let start = before.len() - argument.len();
            return match name {
                "/model" => (start, matching(self.models.names(), argument)),
                "/set" => (start, matching(settings::NAMES.iter().map(|name| (*name).to_owned()), argument)),
                "/think" => (start, matching(["on", "off"].map(str::to_owned), argument)),
                "/file" | "/save" | "/load" => (start, files(argument)),
                _ => (before.len(), Vec::new()),
            };
        }
        if before.starts_with('/') {
            return (0, matching(command::NAMES.iter().map(|name| (*name).to_owned()), before));
        }
        match attachment::last_reference(before) {
            Some(start) => (start, files(&before[start..])),
            None => (before.len(), Vec::new()),
        }
    }
}

/// The command of a line and its argument, as far as it is written.
fn argument(before: &str) -> Option<(&str, &str)> {
    let (name, argument) = before.split_once(' ')?;
    (name.starts_with('/') && !before.contains('\n')).then(|| (name, argument.trim_start()))
}

fn matching(names: impl IntoIterator<Item = String>, begin: &str) -> Vec<Pair> {
    let begins = |name: &String| name.to_lowercase().starts_with(&begin.to_lowercase());
    let mut names: Vec<_> = names.into_iter().filter(begins).collect();
    names.sort();
    names.into_iter().map(|name| Pair { display: name.clone(), replacement: name }).collect()
}

/// The files and folders whose path begins with this, which may begin with a quote.
fn files(begin: &str) -> Vec<Pair> {
    let path = begin.strip_prefix('"').unwrap_or(begin);
    let (folder, name) = match path.rfind('/') {
        Some(slash) => path.split_at(slash + 1),
        None => ("", path),
    };
    let place = attachment::expand_home(if folder.is_empty() { "." } else { folder });
    let entries = fs::read_dir(&place).into_iter().flatten().take(FOLDER_ENTRIES_MAX).flatten();
    let mut found: Vec<Pair> = entries
        .filter_map(|entry| {
            let entry_name = entry.file_name().into_string().ok()?;
            let is_hidden = entry_name.starts_with('.') && !name.starts_with('.');
            let is_printable = !entry_name.contains(char::is_control);
            (entry_name.starts_with(name) && !is_hidden && is_printable).then(|| {
                let slash = if Path::is_dir(&entry.path()) { "/" } else { "" };
                let display = format!("{entry_name}{slash}");
                Pair { replacement: attachment::quoted(&format!("{folder}{display}"), slash.is_empty()), display }
            })
        })
        .collect();
    found.sort_by(|a, b| a.display.cmp(&b.display));
    found
}

impl Completer for ChatHelper {
    type Candidate = Pair;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        Ok(self.candidates(&line[..at]))
    }
}

impl Validator for ChatHelper {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match multi_line::is_open(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Hinter for ChatHelper {
    type Hint = String;
}

impl Highlighter for ChatHelper {}
impl Helper for ChatHelper {}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(before: &str, expected: &[&str]) {
        let mut helper = ChatHelper::new();
        helper.models = ModelNames::Listed(vec!["Qwen/b".to_owned(), "a/c".to_owned()]);
        let (start, pairs) = helper.candidates(before);
        let completed: Vec<_> = pairs.iter().map(|pair| format!("{}{}", &before[..start], pair.replacement)).collect();
        assert_eq!(completed, expected, "{before}");
    }

    #[test]
    fn commands_and_their_arguments_are_completed() {
        check("/ret", &["/retry"]);
        check("/s", &["/save ", "/set ", "/system "]);
        check("/model ", &["/model Qwen/b", "/model a/c"]);
        check("/model q", &["/model Qwen/b"]);
        check("/set temp", &["/set temperature"]);
        check("/think o", &["/think off", "/think on"]);
        check("/system be ", &[]);
        check("plain te", &[]);
    }

    #[test]
    fn files_are_completed_and_quoted_where_they_have_spaces() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["notes.txt", "my notes.txt", ".hidden"] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        fs::create_dir(folder.path().join("nested")).unwrap();
        let path = folder.path().to_str().unwrap();
        check(&format!("/file {path}/n"), &[&format!("/file {path}/nested/"), &format!("/file {path}/notes.txt")]);
        check(&format!("read @{path}/not"), &[&format!("read @{path}/notes.txt")]);
        check(&format!("@{path}/my"), &[&format!("@\"{path}/my notes.txt\"")]);
        check(&format!("@\"{path}/my n"), &[&format!("@\"{path}/my notes.txt\"")]);
        check(&format!("@{path}/.h"), &[&format!("@{path}/.hidden")]);
    }
}
