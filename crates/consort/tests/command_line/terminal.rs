//! What only happens in a terminal: word wrap, the speed of an answer, line editing.

use crate::pty::Pty;
use crate::{consort, oracle, piped, text};

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
