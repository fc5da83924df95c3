//! Finds stop strings in streamed text.
//!
//! Text that may be the start of a stop string is held back until it is known not to be, so that no part of a stop string
//! reaches the client.

/// The maximum length of a stop string, and the maximum number of them.
pub const STOP_BYTES_MAX: usize = 1 << 10;
pub const STOPS_MAX: usize = 64;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum StopError {
    #[error("{count} stop strings, the most is {STOPS_MAX}")]
    TooMany { count: usize },
    #[error("a stop string is empty")]
    Empty,
    #[error("a stop string of {bytes} bytes, the most is {STOP_BYTES_MAX}")]
    TooLong { bytes: usize },
}

/// The result of [`StopStrings::push`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopMatch {
    /// No stop string so far. `text` is final.
    None { text: String },
    /// The stop string `stop`, and the text before it.
    Found { text: String, stop: String },
}

/// Searches a stream for stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text that may be the start of a stop string.
    held: String,
}

impl StopStrings {
    pub fn new(stops: impl IntoIterator<Item = String>) -> Result<Self, StopError> {
        let stops: Vec<String> = stops.into_iter().collect();
        if stops.len() > STOPS_MAX {
            return Err(StopError::TooMany { count: stops.len() });
        }
        for stop in &stops {
            match stop.len() {
                0 => return Err(StopError::Empty),
                bytes if bytes > STOP_BYTES_MAX => return Err(StopError::TooLong { bytes }),
                _ => {}
            }
        }
        Ok(Self { stops, held: String::new() })
    }

    /// Takes the next text of the stream. After [`StopMatch::Found`] the stream is over.
    pub fn push(&mut self, text: &str) -> StopMatch {
        self.held.push_str(text);
        // The earliest end wins, as if the text had come one character at a time; of two with the same end, the longer one.
        let ends = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        let first = ends.min_by_key(|&(start, stop)| (start + stop.len(), start));
        if let Some((start, stop)) = first {
            let stop = stop.clone();
            self.held.truncate(start);
            return StopMatch::Found { text: std::mem::take(&mut self.held), stop };
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        StopMatch::None { text: std::mem::replace(&mut self.held, rest) }
    }

    /// The text that was held back, when the stream ends without a stop string.
    pub fn finish(self) -> String {
        self.held
    }
}

/// The length of the longest suffix of `text` that is a prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let most = text.len().min(stop.len() - 1);
    let starts = text.len() - most..text.len();
    let found = starts.into_iter().find(|&start| text.is_char_boundary(start) && stop.starts_with(&text[start..]));
    found.map_or(0, |start| text.len() - start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut matcher = StopStrings::new(stops.iter().map(|&stop| stop.to_owned())).unwrap();
        let mut all = String::new();
        for piece in pieces {
            match matcher.push(piece) {
                StopMatch::None { text } => all += &text,
                StopMatch::Found { text, stop } => return (all + &text, Some(stop)),
            }
        }
        (all + &matcher.finish(), None)
    }

    #[test]
    fn a_stop_string_may_come_in_pieces() {
        assert_eq!(run(&["STOP"], &["a ST", "O", "P b"]), ("a ".into(), Some("STOP".into())));
        assert_eq!(run(&["STOP"], &["a ST", "OLEN"]), ("a STOLEN".into(), None));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".into(), Some("aab".into())));
        assert_eq!(run(&["\n\n", "é!"], &["x\n", "é", "!"]), ("x\n".into(), Some("é!".into())));
    }

    #[test]
    fn the_stop_string_that_ends_first_counts() {
        assert_eq!(run(&["abcd", "bc"], &["abcd"]), ("a".into(), Some("bc".into())));
        assert_eq!(run(&["bc", "abc"], &["abc"]), (String::new(), Some("abc".into())));
    }

    #[test]
    fn text_that_cannot_begin_a_stop_string_is_not_held_back() {
        let mut matcher = StopStrings::new(["END".to_owned()]).unwrap();
        assert_eq!(matcher.push("the E"), StopMatch::None { text: "the ".into() });
        assert_eq!(matcher.push("x"), StopMatch::None { text: "Ex".into() });
    }

    #[test]
    fn bad_stop_strings_are_refused() {
        assert_eq!(StopStrings::new([String::new()]).err(), Some(StopError::Empty));
        assert_eq!(StopStrings::new(["x".repeat(2000)]).err(), Some(StopError::TooLong { bytes: 2000 }));
        assert_eq!(StopStrings::new(vec!["x".into(); 65]).err(), Some(StopError::TooMany { count: 65 }));
    }

    proptest! {
        #[test]
        fn how_the_text_is_cut_makes_no_difference(text in "[abé]{0,40}", cuts in prop::collection::vec(0usize..40, 0..8)) {
            let stops = ["aba", "bé", "aaaa"];
            let characters: Vec<String> = text.chars().map(String::from).collect();
            let one_by_one = run(&stops, &characters.iter().map(String::as_str).collect::<Vec<_>>());
            let mut pieces = vec![String::new()];
            for (index, character) in characters.iter().enumerate() {
                if cuts.contains(&index) {
                    pieces.push(String::new());
                }
                pieces.last_mut().unwrap().push_str(character);
            }
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stops, &pieces), one_by_one);
        }
    }
}
