//! What only happens in a terminal: word wrap, the speed of an answer, line editing.

use std::fs;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::chat_server::ChatServer;
use crate::pty::Pty;
use crate::{changed_model, consort, oracle, piped, succeed, text};

const COLUMNS: u16 = 40;

fn without_spaces(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace() && !c.is_control()).collect()
}

#[test]
fn chat_wraps_words_tells_the_speed_and_survives_bad_bytes() {
    let model = oracle("qwen3/model-f32");
    let args = ["chat", &model, "--temperature", "0", "--max-tokens", "48", "--plain"];
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

/// A chat with a server that answers as the test says.
fn chat(options: &[&str], columns: u16) -> (ChatServer, Pty) {
    let server = ChatServer::start();
    let mut terminal = Pty::start(consort(&[&["chat", "--url", &server.url], options].concat()), columns);
    terminal.read_to("/exit leaves.");
    terminal.read_to("> ");
    (server, terminal)
}

#[track_caller]
fn exit(mut terminal: Pty) {
    terminal.read_to("> ");
    terminal.send(b"/exit\r");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn keys_that_are_typed_during_an_answer_are_the_next_input() {
    let (server, mut terminal) = chat(&[], COLUMNS);
    terminal.send(b"Hello\r");
    assert_eq!(server.asked(), "Hello");
    server.text("one ");
    server.text("two ");
    terminal.read_to("one");
    terminal.send(b"ty\x1b[Dped\rsecond\nline\rbeg");
    // The keys were read when Ctrl-Z has stopped the program.
    terminal.send(b"\x1a");
    terminal.wait_until_stopped();
    assert!(terminal.is_original(), "a shell could not be used");
    terminal.signal(Signal::CONT);
    server.text("three");
    server.end();
    let answer = terminal.read_to("> ");
    assert_eq!(without_spaces(&answer), "twothree>", "{answer:?}");
    terminal.read_to("typed\n");
    assert_eq!(server.asked(), "typed");
    server.text("four");
    server.end();
    terminal.read_to("> second\nline\n");
    assert_eq!(server.asked(), "second\nline");
    terminal.send(b"un\r");
    server.text("five");
    server.end();
    terminal.read_to("> begun\n");
    assert_eq!(server.asked(), "begun");
    server.end_with("six");
    exit(terminal);
}

#[test]
fn escape_and_ctrl_c_stop_an_answer_and_nothing_else() {
    for key in [&b"\x1b"[..], b"\x03"] {
        let (server, mut terminal) = chat(&[], COLUMNS);
        terminal.send(b"Hello\r");
        server.asked();
        server.text("one two ");
        terminal.read_to("one");
        terminal.send(b"next");
        terminal.send(key);
        terminal.read_to("(interrupted)");
        server.wait_until_left();
        terminal.read_to("> next");
        terminal.send(b"\r");
        assert_eq!(server.asked(), "next");
        server.end_with("three");
        terminal.read_to("three");
        exit(terminal);
    }
}

#[test]
fn escape_stops_an_answer_of_a_model_here() {
    let mut terminal =
        Pty::start(consort(&["chat", &oracle("qwen3/model-f32"), "--temperature", "0", "--plain"]), COLUMNS);
    terminal.read_to("> ");
    // The model would write until its context is full.
    terminal.send(b"Hello\r");
    terminal.read_to("Hello\n");
    terminal.send(b"\x1b");
    terminal.read_to("(interrupted)");
    exit(terminal);
}

#[test]
fn the_terminal_is_restored_however_the_chat_ends() {
    type Ending<'a> = &'a dyn Fn(&mut Pty);
    let ends: [(Ending<'_>, i32); 3] = [
        (&|terminal| terminal.signal(Signal::TERM), 143),
        (&|terminal| terminal.signal(Signal::HUP), 129),
        // The first one stops the answer.
        (&|terminal| terminal.send(b"\x03\x03"), 130),
    ];
    for (end, code) in ends {
        let (server, mut terminal) = chat(&[], COLUMNS);
        terminal.send(b"Hello\r");
        server.asked();
        server.text("one two ");
        terminal.read_to("one");
        assert!(!terminal.is_original());
        end(&mut terminal);
        assert_eq!(terminal.wait(), Some(code));
        assert!(terminal.is_original(), "{code}");
    }
    // A model that is being loaded, and one that cannot be.
    let mut terminal = Pty::start(consort(&["chat", "no/such-model"]), COLUMNS);
    assert_eq!(terminal.wait(), Some(1));
    assert!(terminal.is_original());
}

#[test]
fn ctrl_z_at_the_prompt_leaves_the_terminal_to_the_shell() {
    let (server, mut terminal) = chat(&[], COLUMNS);
    terminal.send(b"Hel\x1a");
    terminal.wait_until_stopped();
    assert!(terminal.is_original());
    terminal.signal(Signal::CONT);
    terminal.read_to("> Hel");
    terminal.send(b"lo\r");
    assert_eq!(server.asked(), "Hello");
    server.end_with("done");
    terminal.read_to("done");
    exit(terminal);
}

#[test]
fn ctrl_c_at_an_empty_prompt_says_how_to_leave() {
    let (_server, mut terminal) = chat(&[], COLUMNS);
    terminal.send(b"\x03");
    terminal.read_to("(Ctrl-D or /exit leaves)");
    terminal.read_to("> ");
    terminal.send(b"half a line\x03");
    let discarded = terminal.read_to("\n> ");
    assert!(!discarded.contains("leaves"), "{discarded}");
    terminal.send(b"\x04");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn a_message_may_have_several_lines() {
    let (server, mut terminal) = chat(&[], COLUMNS);
    for (keys, message) in [
        (&b"one\ntwo\r"[..], "one\ntwo"),
        (b"one\x1b\rtwo\r", "one\ntwo"),
        (b"one\\\rtwo\r", "one\ntwo"),
        (b"\"\"\"\rone\r  /two\r\"\"\"\r", "one\n  /two"),
        (b"\x1b[200~one\rtwo\\\r\rthree\x1b[201~\r", "one\ntwo\\\n\nthree"),
        // The history has the whole message.
        (b"\x1b[A\r", "one\ntwo\\\n\nthree"),
    ] {
        terminal.send(keys);
        assert_eq!(server.asked(), message, "{}", keys.escape_ascii());
        server.end_with("answered");
        terminal.read_to("answered");
        terminal.read_to("> ");
    }
    terminal.send(b"/exit\r");
    assert_eq!(terminal.end().0, Some(0));
}

const MARKDOWN: &str = "# Title\n\nsome **bold** text\n- `code` and [a link](http://x.example)\n\n```py\nx = 1\n```\n";

#[test]
fn markdown_is_rendered_where_the_terminal_has_styles() {
    let (server, mut terminal) = chat(&[], 60);
    terminal.send(b"Hello\r");
    server.asked();
    MARKDOWN.split_inclusive(' ').for_each(|piece| server.text(piece));
    server.text("evil \u{1b}]52;c;eA==\u{7}end");
    server.end();
    let answer = terminal.read_raw_to("end");
    for rendered in
        ["\u{1b}[0;1mTitle\u{1b}[0m", "some \u{1b}[0;1mbold\u{1b}[0m text", "• \u{1b}[0;36mcode\u{1b}[0m and"]
    {
        assert!(answer.contains(rendered), "{rendered:?} in {answer:?}");
    }
    assert!(answer.contains("evil ]52;c;eA==end") && !answer.contains("```"), "{answer:?}");
    exit(terminal);
}

#[test]
fn markdown_is_left_alone_where_nobody_wants_styles() {
    for (option, variable) in [(&["--plain"][..], ("A", "")), (&[], ("NO_COLOR", "1")), (&[], ("TERM", "dumb"))] {
        let server = ChatServer::start();
        let mut command = consort(&[&["chat", "--url", &server.url], option].concat());
        command.env(variable.0, variable.1);
        let mut terminal = Pty::start(command, 60);
        terminal.read_to("> ");
        terminal.send(b"Hello\r");
        server.asked();
        server.reasoning("hm");
        server.text(MARKDOWN);
        server.end();
        let answer = terminal.read_raw_to("x = 1\r\n```");
        assert!(answer.contains("# Title") && answer.contains("some **bold** text"), "{variable:?}: {answer:?}");
        assert!(answer.contains("(reasoning)\r\nhm\r\n(answer)\r\n"), "{answer:?}");
        exit(terminal);
    }
}

#[test]
fn reasoning_is_dimmed_and_not_part_of_the_conversation() {
    let (server, mut terminal) = chat(&[], COLUMNS);
    terminal.send(b"Hello\r");
    server.asked();
    server.reasoning("let me ");
    server.reasoning("think");
    server.text("yes");
    server.end();
    let answer = terminal.read_raw_to("yes");
    assert!(answer.contains("\u{1b}[0;2mlet me think\u{1b}[0m\r\n\r\nyes"), "{answer:?}");
    terminal.read_to("> ");
    terminal.send(b"Bye\r");
    let messages = server.request()["messages"].clone();
    assert_eq!(messages[1], json!({"role": "assistant", "content": "yes"}));
    server.end_with("bye");
    exit(terminal);
}

#[test]
fn tab_completes_commands_models_and_files() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("some notes.txt"), "the text").unwrap();
    let (server, mut terminal) = chat(&[], 200);
    terminal.send(b"/mod\toth\t\r");
    terminal.read_to("(other answers from now on)");
    terminal.read_to("> ");
    terminal.send(format!("read @{}/so\t\r", folder.path().display()).as_bytes());
    let asked = server.request();
    assert_eq!(asked["model"], "other");
    let message = asked["messages"][0]["content"].as_str().unwrap();
    assert!(message.starts_with("read @\"") && message.ends_with("some notes.txt:\n```\nthe text\n```"), "{message}");
    server.end_with("done");
    terminal.read_to("done");
    exit(terminal);
}
