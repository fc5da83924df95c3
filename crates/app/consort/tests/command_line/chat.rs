//! `chat` with its lines from a pipe: the commands, and what a user is told.

use std::fs;

use serde_json::json;

use crate::{changed_model, oracle, piped, text};

/// The answers and the notes to these lines.
fn converse(options: &[&str], lines: &[u8]) -> (String, String) {
    converse_with(&oracle("qwen3/model-f32"), options, lines)
}

fn converse_with(model: &str, options: &[&str], lines: &[u8]) -> (String, String) {
    let output = piped(&[&["chat", model, "--temperature", "0"], options].concat(), lines);
    assert!(output.status.success(), "{}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

const SHORT: [&str; 2] = ["--max-tokens", "5"];

fn answers(lines: &str) -> String {
    converse(&SHORT, lines.as_bytes()).0
}

#[test]
fn retry_answers_the_last_message_again() {
    let (first, both) = (answers("Hello\n"), answers("Hello\nBye\n"));
    assert_eq!(answers("Hello\n/retry\n"), first.repeat(2));
    assert_eq!(answers("Hello\n/retry\nBye\n"), format!("{first}{both}"));
    assert_eq!(answers("/retry\nHello\n"), first);
}

#[test]
fn the_system_prompt_can_be_set_and_removed() {
    let with_option =
        converse(&[&SHORT[..], &["--system", "Answer in rhymes about the sea and the wind."]].concat(), b"Hello\n").0;
    assert_ne!(with_option, answers("Hello\n"));
    assert_eq!(answers("/system Answer in rhymes about the sea and the wind.\nHello\n"), with_option);
    assert_eq!(answers("/system Answer in rhymes about the sea and the wind.\n/system -\nHello\n"), answers("Hello\n"));
    let shown = converse(&SHORT, b"/system Answer in rhymes about the sea and the wind.\n/system\n").1;
    assert!(shown.contains("(system prompt: Answer in rhymes about the sea and the wind.)"), "{shown}");
}

#[test]
fn sampling_parameters_can_be_set() {
    let longer = answers("/set max_tokens 9\nHello\n");
    assert_eq!(longer, converse(&["--max-tokens", "9"], b"Hello\n").0);
    let notes = converse(&SHORT, b"/set\n/set temperature -1\n/set colour red\n/set top_p\n/nonsense\n/help\n").1;
    for note in ["max_tokens   5", "it must be from 0 to 1000", "no parameter colour", "needs a value", "/retry "] {
        assert!(notes.contains(note), "{note}: {notes}");
    }
    assert!(notes.contains("/nonsense is no command"), "{notes}");
}

#[test]
fn a_saved_conversation_goes_on_after_it_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("chat.json");
    let file = file.to_str().unwrap();
    let whole = answers("Hello\nBye\n");
    let first = answers(&format!("Hello\n/save {file}\n"));
    assert_eq!(answers(&format!("/load {file}\nBye\n")), whole[first.len()..]);
    let notes = converse(&SHORT, format!("/save {file}\n/load /no/where\n").as_bytes()).1;
    assert!(notes.contains("exists already") && notes.contains("read /no/where"), "{notes}");
}

#[test]
fn a_byte_that_is_not_utf_8_does_not_end_it() {
    let (out, _) = converse(&SHORT, b"caf\xe9\n/clear\nHello\n");
    assert!(out.ends_with(&answers("Hello\n")) && out.lines().count() >= 2, "{out}");
}

#[test]
fn an_answer_that_is_cut_off_says_why() {
    let (_, notes) = converse(&SHORT, b"Hello\n");
    assert!(notes.contains("(cut off: max_tokens is 5)"), "{notes}");
    let (_, notes) = converse(&["--context", "64"], b"Hello\n");
    assert!(notes.contains("(cut off: the context of 64 tokens is full)"), "{notes}");
}

/// A file with a conversation of these messages, by user and assistant in turns.
fn saved(messages: &[&str]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let roles = ["user", "assistant"].into_iter().cycle();
    let messages: Vec<_> =
        roles.zip(messages).map(|(role, content)| json!({"role": role, "content": content})).collect();
    fs::write(&file, json!({"messages": messages}).to_string()).unwrap();
    file
}

#[test]
fn the_oldest_turns_of_a_long_conversation_are_forgotten_at_once() {
    let file = saved(&["a message", "an answer"].repeat(1000));
    let lines = format!("/load {}\nHello\n", file.path().display());
    let (out, notes) = converse(&[&SHORT[..], &["--context", "64"]].concat(), lines.as_bytes());
    assert!(!out.is_empty(), "{notes}");
    let forgotten: Vec<_> = notes.lines().filter(|line| line.contains("forgotten")).collect();
    assert_eq!(forgotten.len(), 1, "{notes}");
    assert!(forgotten[0].contains("its oldest ") && forgotten[0].contains(" turns are"), "{notes}");
}

#[test]
fn turns_that_exceed_the_limits_of_the_template_are_forgotten() {
    let folder = changed_model("tokenizer_config.json", |config| {
        let doubles = "{% if messages[0].content == 'double' %}{% set ns = namespace(x='x') %}\
            {% for i in range(120) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{% endif %}";
        config["chat_template"] = json!(format!("{doubles}{}", config["chat_template"].as_str().unwrap()));
    });
    let file = saved(&["double", "an answer"]);
    let lines = format!("/load {}\nHello\n", file.path().display());
    let (out, notes) = converse_with(folder.path().to_str().unwrap(), &SHORT, lines.as_bytes());
    assert!(notes.contains("its oldest turn is forgotten"), "{notes}");
    assert_eq!(out, answers("Hello\n"));
    let (out, notes) = converse_with(folder.path().to_str().unwrap(), &SHORT, b"double\nHello\n");
    assert!(notes.contains("exceeds its limits"), "{notes}");
    assert_eq!(out, answers("Hello\n"));
}

#[test]
fn lines_that_belong_together_are_one_message() {
    let one = answers("a\\\nb\n");
    assert_eq!(answers("\"\"\"\na\nb\n\"\"\"\n"), one);
    assert_ne!(answers("a\nb\n"), one);
    // What is in quotes is no command.
    let notes = converse(&SHORT, b"\"\"\"/nonsense\"\"\"\n").1;
    assert!(!notes.contains("no command"), "{notes}");
}

#[test]
fn files_become_part_of_the_next_message() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a note.txt").display().to_string();
    fs::write(&path, "some text\n").unwrap();
    let whole = answers(&format!("\"\"\"What is this?\n\nFile {path}:\n```\nsome text\n```\"\"\"\n"));
    assert_eq!(answers(&format!("/file \"{path}\"\nWhat is this?\n")), whole);
    let (out, notes) = converse(&SHORT, format!("/file {path}\n/file\n/clear\n/file\n").as_bytes());
    assert!(out.is_empty() && notes.matches("a note.txt, 1 line").count() == 2, "{notes}");
    assert!(notes.contains("(no file is part of the next message"), "{notes}");
    let (_, notes) = converse(&SHORT, format!("see @\"{path}\" and @nothing\n").as_bytes());
    assert!(
        notes.contains("a note.txt, 1 line)") && notes.contains("(@nothing is no file: it is sent as text)"),
        "{notes}"
    );
    fs::write(&path, b"\xff").unwrap();
    let (out, notes) = converse(&SHORT, format!("see @\"{path}\"\n/file {path}\n/file /no/where\n").as_bytes());
    assert!(out.is_empty() && notes.matches("is no text in UTF-8").count() == 2, "{notes}");
    assert!(notes.contains("the message is not sent") && notes.contains("read /no/where"), "{notes}");
}

#[test]
fn another_model_goes_on_with_the_conversation() {
    let [first, second] = ["qwen3/model-f32", "qwen3/model-bf16"].map(oracle);
    let lines = format!("Hello\n/model /no/where\n/model {second}\nBye\n/model\n");
    let (out, notes) = converse_with(&first, &SHORT, lines.as_bytes());
    assert!(notes.contains("no such file or folder: /no/where"), "{notes}");
    assert!(notes.contains("(it is still model-f32)"), "{notes}");
    assert!(notes.contains("(model-bf16 answers from now on)") && notes.contains("(answers now)"), "{notes}");
    let hello = answers("Hello\n");
    let file = saved(&["Hello", hello.trim_end_matches('\n')]);
    let (alone, _) = converse_with(&second, &SHORT, format!("/load {}\nBye\n", file.path().display()).as_bytes());
    assert_eq!(out, format!("{hello}{alone}"));
}

#[test]
fn reasoning_is_told_from_the_answer() {
    // The template opens the reasoning, which the tiny model never closes.
    let folder = changed_model("tokenizer_config.json", |config| {
        let template = config["chat_template"].as_str().unwrap();
        config["chat_template"] = json!(format!("{template}{{{{ '<think>' }}}}{{# </think> enable_thinking #}}"));
    });
    let (out, notes) = converse_with(folder.path().to_str().unwrap(), &SHORT, b"Hello\n/think off\n/think maybe\n");
    assert_eq!(out, "\n", "a program gets the answer alone");
    assert!(
        notes.contains("(the model answers without reasoning)") && notes.contains("it is on, off or default"),
        "{notes}"
    );
    let plain = changed_model("tokenizer_config.json", |config| {
        config["chat_template"] = json!("{% for message in messages %}{{ message.content }}{% endfor %}");
    });
    let (_, notes) = converse_with(plain.path().to_str().unwrap(), &SHORT, b"/think on\n");
    assert!(notes.contains("cannot be told whether to reason"), "{notes}");
}
