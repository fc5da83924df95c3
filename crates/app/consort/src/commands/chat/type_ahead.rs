//! `TypeAhead`: what is typed while an answer is printed, from bytes to messages. It becomes the next input.

use std::collections::VecDeque;

use super::multi_line;

/// What is typed beyond this is discarded.
const TYPED_BYTES_MAX: usize = 1 << 20;

const ESCAPE: u8 = 0x1b;
const PASTE_END: &[u8] = b"\x1b[201~";

/// What was typed, complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Typed {
    Message(String),
    /// Ctrl-D.
    End,
}

/// A key that acts at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionKey {
    /// Esc.
    Cancel,
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-Z.
    Suspend,
}

#[derive(Default)]
pub struct TypeAhead {
    messages: VecDeque<Typed>,
    /// The message that is not complete.
    line: Vec<u8>,
    state: KeyState,
}

#[derive(Default, PartialEq, Eq)]
enum KeyState {
    #[default]
    Key,
    /// After an escape character: the Esc key, or the start of a sequence.
    Escape,
    /// In `ESC [ …`, with its parameters.
    Sequence(Vec<u8>),
    /// In `ESC O …`.
    Function,
    /// In a paste, with its text.
    Paste(Vec<u8>),
}

impl TypeAhead {
    /// The next bytes from the terminal.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<ActionKey> {
        bytes.iter().filter_map(|&byte| self.take(byte)).collect()
    }

    /// Whether an escape character was the last byte. If nothing follows it at once, it is the Esc key.
    pub fn ends_with_escape(&self) -> bool {
        self.state == KeyState::Escape
    }

    /// Nothing followed the escape character.
    pub fn escape_key(&mut self) -> ActionKey {
        self.state = KeyState::Key;
        ActionKey::Cancel
    }

    /// The first complete message.
    pub fn next(&mut self) -> Option<Typed> {
        self.messages.pop_front()
    }

    /// The text of the message that is not complete.
    pub fn take_line(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned()
    }

    fn take(&mut self, byte: u8) -> Option<ActionKey> {
        match (std::mem::take(&mut self.state), byte) {
            (KeyState::Key, _) => return self.key(byte),
            (KeyState::Escape, ESCAPE) => {
                self.state = KeyState::Escape;
                return Some(ActionKey::Cancel);
            }
            (KeyState::Escape, b'[') => self.state = KeyState::Sequence(Vec::new()),
            (KeyState::Escape, b'O') => self.state = KeyState::Function,
            // Alt-Enter.
            (KeyState::Escape, b'\r' | b'\n') => self.append(b'\n'),
            // Other keys with Alt, and function keys, edit a line that is not shown yet.
            (KeyState::Escape | KeyState::Function, _) => {}
            (KeyState::Sequence(parameters), 0x40..=0x7e) => {
                if parameters == b"200" && byte == b'~' {
                    self.state = KeyState::Paste(Vec::new());
                }
            }
            (KeyState::Sequence(mut parameters), _) => {
                // No sequence of a key is this long.
                if parameters.len() < 32 {
                    parameters.push(byte);
                    self.state = KeyState::Sequence(parameters);
                }
            }
            (KeyState::Paste(mut text), _) => {
                if self.bytes() + text.len() < TYPED_BYTES_MAX {
                    text.push(byte);
                } else if let Some(end) = text.last_chunk_mut::<{ PASTE_END.len() }>() {
                    // Goes on looking for the end.
                    end.rotate_left(1);
                    end[PASTE_END.len() - 1] = byte;
                }
                match text.strip_suffix(PASTE_END) {
                    Some(text) => self.paste(text),
                    None => self.state = KeyState::Paste(text),
                }
            }
        }
        None
    }

    fn key(&mut self, byte: u8) -> Option<ActionKey> {
        match byte {
            ESCAPE => self.state = KeyState::Escape,
            b'\r' => self.enter(),
            // Ctrl-J.
            b'\n' => self.append(b'\n'),
            // Backspace.
            0x7f | 0x08 => self.erase_char(),
            // Ctrl-W and Ctrl-U.
            0x17 => self.erase_word(),
            0x15 => self.line.clear(),
            0x04 if self.line.is_empty() && self.bytes() < TYPED_BYTES_MAX => self.messages.push_back(Typed::End),
            0x03 => return Some(ActionKey::Interrupt),
            0x1a => return Some(ActionKey::Suspend),
            0x20.. => self.append(byte),
            _ => {}
        }
        None
    }

    fn enter(&mut self) {
        let line = String::from_utf8_lossy(&self.line);
        if multi_line::is_open(&line) {
            self.append(b'\n');
        } else if multi_line::is_continued(&line) {
            self.line.pop();
            self.append(b'\n');
        } else if line.trim().is_empty() {
            self.line.clear();
        } else {
            self.messages.push_back(Typed::Message(line.into_owned()));
            self.line.clear();
        }
    }

    fn paste(&mut self, text: &[u8]) {
        let text = String::from_utf8_lossy(text).replace("\r\n", "\n").replace('\r', "\n");
        text.bytes().for_each(|byte| self.append(byte));
    }

    fn append(&mut self, byte: u8) {
        if self.bytes() < TYPED_BYTES_MAX {
            self.line.push(byte);
        }
    }

    fn erase_char(&mut self) {
        // The other bytes of a character begin with the bits 10.
        while self.line.pop().is_some_and(|byte| byte & 0xc0 == 0x80) {}
    }

    fn erase_word(&mut self) {
        while self.line.pop_if(|byte| *byte == b' ').is_some() {}
        while self.line.pop_if(|byte| *byte != b' ').is_some() {}
    }

    /// All bytes that are kept.
    fn bytes(&self) -> usize {
        let message = |typed: &Typed| if let Typed::Message(text) = typed { text.len() } else { 1 };
        self.line.len() + self.messages.iter().map(message).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages and the incomplete line. They must be the same for pieces of any size.
    #[track_caller]
    fn check(bytes: &[u8], messages: &[&str], line: &str, keys: &[ActionKey]) {
        for piece in [1, 2, 3, bytes.len().max(1)] {
            let mut typed = TypeAhead::default();
            let mut pressed: Vec<_> = bytes.chunks(piece).flat_map(|piece| typed.push(piece)).collect();
            if typed.ends_with_escape() {
                pressed.push(typed.escape_key());
            }
            for message in messages {
                assert_eq!(typed.next(), Some(Typed::Message((*message).to_owned())));
            }
            assert_eq!((typed.next(), typed.take_line()), (None, line.to_owned()), "{:?}", bytes.escape_ascii());
            assert_eq!(pressed, keys);
        }
    }

    #[test]
    fn lines_become_messages_and_the_last_one_is_kept() {
        check(b"one\rtwo\rthr", &["one", "two"], "thr", &[]);
        check(b"\r \rcaf\xc3\xa9\r", &["café"], "", &[]);
        check(b"ab\x7fc\xc3\xa9\x7f d ef\x17g", &[], "ac d g", &[]);
        check(b"gone\x15kept", &[], "kept", &[]);
    }

    #[test]
    fn a_message_may_have_several_lines() {
        check(b"a\nb\x1b\rc\\\rd\re", &["a\nb\nc\nd"], "e", &[]);
        check(b"\"\"\"a\rb\"\"\"\rc", &["\"\"\"a\nb\"\"\""], "c", &[]);
        check(b"\x1b[200~one\r\ntwo\rthree\x1b[201~!\r", &["one\ntwo\nthree!"], "", &[]);
    }

    #[test]
    fn keys_that_only_edit_are_ignored() {
        check(b"a\x1b[A\x1b[1;5Cb\x1bOP\x1bfc\x01\x09d", &[], "abcd", &[]);
    }

    #[test]
    fn some_keys_act_at_once() {
        check(b"a\x1b", &[], "a", &[ActionKey::Cancel]);
        check(b"a\x1b\x1b[Ab", &[], "ab", &[ActionKey::Cancel]);
        check(b"a\x1ab\x03", &[], "ab", &[ActionKey::Suspend, ActionKey::Interrupt]);
        let mut typed = TypeAhead::default();
        typed.push(b"a\x04\r\x04");
        assert_eq!([typed.next(), typed.next()], [Some(Typed::Message("a".to_owned())), Some(Typed::End)]);
    }

    #[test]
    fn what_is_typed_is_bounded() {
        let mut typed = TypeAhead::default();
        typed.push(b"\x1b[200~");
        typed.push(&vec![b'x'; TYPED_BYTES_MAX + 100]);
        typed.push(b"\x1b[201~y\r");
        let Some(Typed::Message(message)) = typed.next() else { panic!("there is no message") };
        assert!(message.len() <= TYPED_BYTES_MAX && typed.take_line().is_empty());
    }
}
