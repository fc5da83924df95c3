//! `/save` and `/load`: a conversation as a JSON file, with the messages of OpenAI's API.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use text::Message;

use super::attachment::expand_home;
use super::conversation::{Turn, messages};
use crate::bounded_file;

const FILE_BYTES_MAX: u64 = 64 << 20;

#[derive(Serialize, Deserialize)]
struct Transcript {
    #[serde(default)]
    model: String,
    messages: Vec<Message>,
}

/// Saves and loads conversations.
#[derive(Default)]
pub struct Transcripts {
    /// The files that were saved or loaded, which may be overwritten.
    own: HashSet<PathBuf>,
}

impl Transcripts {
    /// Writes a conversation and returns a note for the user. Overwrites no file that this chat has neither saved nor
    /// loaded.
    pub fn save(&mut self, file: &str, model: &str, system: Option<&str>, turns: &[Turn]) -> Result<String, String> {
        let path = expand_home(file);
        let transcript = Transcript { model: model.to_owned(), messages: messages(system, turns) };
        let mut json = serde_json::to_string_pretty(&transcript).map_err(|error| error.to_string())?;
        json.push('\n');
        let own = self.own.contains(&path);
        let mut options = OpenOptions::new();
        options.write(true).truncate(own).create(own).create_new(!own);
        match options.open(&path).and_then(|mut out| out.write_all(json.as_bytes())) {
            Ok(()) => {
                self.own.insert(path);
                Ok(format!("({} saved in {file})", counted(turns.len())))
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(format!("{file} exists already: name another file"))
            }
            Err(error) => Err(format!("write {file}: {error}")),
        }
    }

    /// The system prompt and the turns in a file.
    pub fn load(&mut self, file: &str) -> Result<(Option<String>, Vec<Turn>), String> {
        let path = expand_home(file);
        let json = bounded_file::read(&path, FILE_BYTES_MAX).map_err(|error| format!("read {file}: {error}"))?;
        let transcript: Transcript =
            serde_json::from_slice(&json).map_err(|error| format!("{file} is no saved conversation: {error}"))?;
        let conversation = turns(transcript.messages).map_err(|why| format!("{file} is no conversation: {why}"))?;
        self.own.insert(path);
        Ok(conversation)
    }
}

/// A number of turns, in words.
pub fn counted(turns: usize) -> String {
    format!("{turns} {}", if turns == 1 { "turn" } else { "turns" })
}

/// An optional system prompt, then messages of user and assistant in turns.
fn turns(messages: Vec<Message>) -> Result<(Option<String>, Vec<Turn>), String> {
    let (mut system, mut turns) = (None, Vec::<Turn>::new());
    for (index, message) in messages.iter().enumerate() {
        let text = message.text();
        let open = turns.last_mut().filter(|turn| turn.assistant.is_none());
        match (message.role.as_str(), open) {
            ("system", _) if index == 0 => system = Some(text),
            ("user", None) => turns.push(Turn { user: text, assistant: None }),
            ("assistant", Some(turn)) => turn.assistant = Some(text),
            _ => return Err(format!("message {} is out of turn", index + 1)),
        }
    }
    Ok((system, turns))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn turn(user: &str, assistant: Option<&str>) -> Turn {
        Turn { user: user.to_owned(), assistant: assistant.map(str::to_owned) }
    }

    #[test]
    fn what_is_saved_can_be_loaded_and_saved_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("chat.json");
        let file = file.to_str().unwrap();
        let turns = [turn("a", Some("b")), turn("c\n\"d\"", None)];
        let mut transcripts = Transcripts::default();
        transcripts.save(file, "tiny", Some("be short"), &turns).unwrap();
        let loaded = Transcripts::default().load(file).unwrap();
        assert_eq!(loaded, (Some("be short".to_owned()), turns.to_vec()));
        transcripts.save(file, "tiny", None, &turns[..1]).unwrap();
        assert_eq!(transcripts.load(file).unwrap(), (None, turns[..1].to_vec()));
    }

    #[test]
    fn every_file_that_was_saved_or_loaded_may_be_saved_again() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["first.json", "second.json"].map(|name| folder.path().join(name).display().to_string());
        Transcripts::default().save(&first, "tiny", None, &[]).unwrap();
        let mut transcripts = Transcripts::default();
        transcripts.load(&first).unwrap();
        for file in [&second, &first, &second] {
            transcripts.save(file, "tiny", None, &[turn("a", Some("b"))]).unwrap();
        }
    }

    #[test]
    fn a_file_of_somebody_else_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("notes.txt");
        fs::write(&file, "mine").unwrap();
        let refused = Transcripts::default().save(file.to_str().unwrap(), "tiny", None, &[]).unwrap_err();
        assert!(refused.contains("exists already"), "{refused}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    }

    #[test]
    fn files_that_are_no_conversation_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.json");
        for text in [
            "",
            "[]",
            "\u{0}",
            r#"{"messages": [{"role": "assistant", "content": "a"}]}"#,
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}"#,
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}"#,
        ] {
            fs::write(&file, text).unwrap();
            assert!(Transcripts::default().load(file.to_str().unwrap()).is_err(), "{text}");
        }
        assert!(Transcripts::default().load("/no/where").unwrap_err().starts_with("read /no/where"));
    }
}
