//! What only happens in a terminal: word wrap, the speed of an answer, line editing.

use std::fs;

use serde_json::{Value, json};

use crate::pty::Pty;
use crate::{changed_model, consort, oracle, piped, succeed, text};

const COLUMNS: u16 = 40;

fn without_spaces(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace() && !c.is_control()).collect()
}

#[test]
fn chat_wraps_words_tells_the_speed_and_survives_bad_bytes() {
    let model = oracle("qwen3/model-f32");
    let args = ["chat", &model, "--temperature", "0", "--max-tokens", "48"];
    let answer = text(&piped(&args, b"Hello\n").stdout);
    assert!(answer.lines().any(|line| line.chars().count() > COLUMNS.into()), "the answer needs no wrapping: {answer}");

    let mut terminal = Pty::start(consort(&args), COLUMNS);
    terminal.read_to("/exit leaves.");
    terminal.read_to("> ");
    terminal.send(b"Hello\r");
    let echo = terminal.read_to("Hello\n");
    assert!(!echo.contains("time to first token"));
    let printed = terminal.read_to("(cut off: max_tokens is 48)");
    let printed = printed.strip_suffix("(cut off: max_tokens is 48)").unwrap();
    assert_eq!(without_spaces(printed), without_spaces(&answer));
    for line in printed.lines().filter(|line| line.contains(' ')) {
        assert!(line.chars().count() <= COLUMNS.into(), "{line:?} in {printed}");
    }
    let speed = terminal.read_to("time to first token");
    assert!(speed.contains("48 tokens, ") && speed.contains(" tokens/s"), "{speed}");

    terminal.read_to("> ");
    terminal.send(b"caf\xe9 \r");
    terminal.read_to("not UTF-8");
    terminal.read_to("> ");
    terminal.send(b"/set temperature -1\r");
    terminal.read_to("it must be from 0 to 1000");
    terminal.read_to("> ");
    terminal.send(b"/exit\r");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn run_tells_the_speed_in_a_terminal_unless_told_not_to() {
    let model = oracle("llama/model-f32");
    let args = ["run", &model, "Hello", "--temperature", "0", "--max-tokens", "8"];
    let (code, printed) = Pty::start(consort(&args), COLUMNS).end();
    assert_eq!(code, Some(0));
    assert!(printed.contains("8 tokens, ") && printed.contains("time to first token"), "{printed}");
    let quiet = [&args[..], &["--stats=never"]].concat();
    let (code, printed) = Pty::start(consort(&quiet), COLUMNS).end();
    assert_eq!(code, Some(0));
    assert!(!printed.contains("time to first token"), "{printed}");
}

fn printed_in_terminal(args: &[&str]) -> String {
    let (code, printed) = Pty::start(consort(args), COLUMNS).end();
    assert_eq!(code, Some(0), "{printed}");
    printed
}

/// Sets the clipboard of a terminal.
const ATTACK: &str = "\u{1b}]52;c;eA==\u{7}";

#[test]
fn control_characters_of_an_answer_reach_a_pipe_and_no_terminal() {
    let options = ["Hello", "--raw", "--temperature", "0", "--max-tokens", "8"];
    let first = succeed(&[&["run", &oracle("qwen3/model-f32"), "--json"], &options[..]].concat());
    let first: Value = serde_json::from_str(&first).unwrap();
    let folder = changed_model("tokenizer.json", |tokenizer| {
        // The byte ESC, as this kind of vocabulary writes it, becomes the first token of the answer.
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let name = vocab.iter().find(|(_, id)| **id == first["tokens"][0]).unwrap().0.clone();
        let escape = vocab["\u{11b}"].clone();
        vocab.insert("\u{11b}".to_owned(), first["tokens"][0].clone());
        vocab.insert(name, escape);
    });
    let args = [&["run", folder.path().to_str().unwrap()], &options[..]].concat();
    assert!(succeed(&args).starts_with('\u{1b}'));
    let printed = printed_in_terminal(&args);
    assert!(!printed.is_empty() && !printed.contains('\u{1b}'), "{printed:?}");
}

#[test]
fn control_characters_of_a_template_reach_no_terminal() {
    let folder =
        changed_model("tokenizer_config.json", |config| config["chat_template"] = json!(format!("<{ATTACK}>")));
    let args = ["show", folder.path().to_str().unwrap(), "--template"];
    assert_eq!(succeed(&args), format!("<{ATTACK}>\n"));
    assert_eq!(printed_in_terminal(&args), "<]52;c;eA==>\n");
}

#[test]
fn control_characters_of_a_loaded_conversation_reach_no_terminal() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let messages = json!([{"role": "system", "content": format!("<{ATTACK}>")}]);
    fs::write(&file, json!({"messages": messages}).to_string()).unwrap();
    let mut terminal = Pty::start(consort(&["chat", &oracle("qwen3/model-f32")]), COLUMNS);
    terminal.read_to("> ");
    terminal.send(format!("/load {}\r", file.path().display()).as_bytes());
    terminal.read_to("(0 turns loaded)");
    terminal.read_to("> ");
    terminal.send(b"/system\r");
    terminal.read_to("(system prompt: <]52;c;eA==>)");
    terminal.send(b"/exit\r");
    assert_eq!(terminal.end().0, Some(0));
}
