//! Detects a tool call that was made before in the same reply.
//!
//! Small models repeat a call until the reply is cut off. The first repetition ends the reply. A repetition is known only by
//! its arguments, so a call of a tool that was called before is held back until its arguments differ from all earlier ones.

use super::Delta;

/// Filters the deltas of one reply.
#[derive(Debug, Default)]
pub struct RepeatedCalls {
    /// The calls so far, with their arguments without white space. The last one may be incomplete.
    calls: Vec<(String, CompactJson)>,
    /// The deltas of the last call, while it may be a repetition.
    held: Vec<Delta>,
    /// A call was repeated: the reply has ended.
    ended: bool,
}

impl RepeatedCalls {
    /// The deltas that may be passed on.
    pub fn filter(&mut self, deltas: Vec<Delta>) -> Vec<Delta> {
        let mut passed = Vec::with_capacity(deltas.len());
        for delta in deltas {
            if self.ended {
                break;
            }
            self.take(delta, &mut passed);
        }
        passed
    }

    /// True if a call was repeated. The repetition and all that follows are dropped.
    pub fn has_repeated(&self) -> bool {
        self.ended
    }

    fn take(&mut self, delta: Delta, passed: &mut Vec<Delta>) {
        match &delta {
            Delta::ToolCall { name, .. } => {
                passed.append(&mut self.held);
                let called_before = self.calls.iter().any(|(other, _)| other == name);
                self.calls.push((name.clone(), CompactJson::default()));
                if called_before {
                    return self.held.push(delta);
                }
            }
            Delta::Arguments { json, .. } => {
                if let Some((_, arguments)) = self.calls.last_mut() {
                    arguments.push(json);
                }
                if !self.held.is_empty() {
                    self.held.push(delta);
                    return self.check(passed);
                }
            }
            Delta::Text(_) | Delta::Reasoning(_) => passed.append(&mut self.held),
        }
        passed.push(delta);
    }

    /// Compares the call that is held back with the earlier ones.
    fn check(&mut self, passed: &mut Vec<Delta>) {
        let Some(((name, arguments), earlier)) = self.calls.split_last() else { return };
        let mut same_tool = earlier.iter().filter(|(other, _)| other == name).map(|(_, other)| other.text.as_str());
        if same_tool.clone().any(|other| other == arguments.text) {
            self.ended = true;
            self.held.clear();
        } else if !same_tool.any(|other| other.starts_with(&arguments.text)) {
            passed.append(&mut self.held);
        }
    }
}

/// JSON without the white space between its tokens.
#[derive(Debug, Default)]
struct CompactJson {
    text: String,
    in_string: bool,
    escaped: bool,
}

impl CompactJson {
    fn push(&mut self, json: &str) {
        for c in json.chars() {
            if !self.in_string && c.is_ascii_whitespace() {
                continue;
            }
            self.text.push(c);
            self.in_string ^= c == '"' && !self.escaped;
            self.escaped = self.in_string && c == '\\' && !self.escaped;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(index: usize, name: &str, pieces: &[&str]) -> Vec<Delta> {
        let mut deltas = vec![Delta::ToolCall { index, name: name.to_owned() }];
        deltas.extend(pieces.iter().map(|json| Delta::Arguments { index, json: (*json).to_owned() }));
        deltas
    }

    /// What is passed on of these deltas, one at a time, and whether a call was repeated.
    fn filtered(deltas: &[Delta]) -> (Vec<Delta>, bool) {
        let mut calls = RepeatedCalls::default();
        let passed = deltas.iter().flat_map(|delta| calls.filter(vec![delta.clone()])).collect();
        let mut at_once = RepeatedCalls::default();
        let together: Vec<Delta> = at_once.filter(deltas.to_vec());
        assert_eq!((&together, at_once.has_repeated()), (&passed, calls.has_repeated()));
        (passed, calls.has_repeated())
    }

    #[test]
    fn a_call_that_was_made_before_ends_the_reply() {
        let first = call(0, "f", &["{\"a\": ", "\"x y\"}"]);
        for again in [&["{\"a\": ", "\"x y\"}"] as &[&str], &["{\"a\":\"x y\"}"], &["{", " \"a\" : \"x", " y\" }"]] {
            let rest = [call(1, "f", again), call(2, "g", &["{}"]), vec![Delta::Text("more".to_owned())]].concat();
            assert_eq!(filtered(&[first.clone(), rest].concat()), (first.clone(), true), "{again:?}");
        }
    }

    #[test]
    fn other_arguments_or_another_tool_are_another_call() {
        let deltas = [
            call(0, "f", &["{\"a\": ", "1}"]),
            call(1, "f", &["{\"a\": ", "12}"]),
            call(2, "g", &["{\"a\": 1}"]),
            call(3, "f", &["{\"a\": \"1\"}"]),
            call(4, "f", &["{\"a\": \"x  y\"}"]),
            call(5, "f", &["{\"a\": \"x y\"}"]),
            call(6, "f", &["{\"a\": \"\\\" 1\"}"]),
            call(7, "f", &["{\"a\": \"\\\"1\"}"]),
        ];
        let deltas = deltas.concat();
        assert_eq!(filtered(&deltas), (deltas, false));
    }

    #[test]
    fn a_call_is_passed_on_as_soon_as_it_differs() {
        let mut calls = RepeatedCalls::default();
        let first = call(0, "f", &["{\"city\": \"Paris\"}"]);
        assert_eq!(calls.filter(first.clone()), first);
        let second = call(1, "f", &["{\"city\": ", "\"R", "ome\"}"]);
        assert_eq!(calls.filter(second[..2].to_vec()), []);
        assert_eq!(calls.filter(second[2..3].to_vec()), second[..3]);
        assert_eq!(calls.filter(second[3..].to_vec()), second[3..]);
    }

    #[test]
    fn a_repetition_that_is_cut_off_is_dropped() {
        let first = call(0, "f", &["{\"a\": 1}"]);
        let (passed, repeated) = filtered(&[first.clone(), call(1, "f", &["{\"a\""])].concat());
        assert_eq!((passed, repeated), (first, false));
    }
}
