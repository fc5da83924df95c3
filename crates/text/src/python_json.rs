//! JSON in the format of Python's `json.dumps`, because templates are written for it and models are trained with it.

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io;

/// One line with `", "` and `": "`, or indented lines. Characters outside ASCII are not escaped.
pub(crate) fn dumps(value: &impl Serialize, indent: Option<usize>) -> Result<String, serde_json::Error> {
    let mut out = Vec::new();
    match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, OneLine))?,
        Some(width) => {
            let spaces = " ".repeat(width);
            let pretty = Indented(PrettyFormatter::with_indent(spaces.as_bytes()));
            value.serialize(&mut Serializer::with_formatter(&mut out, pretty))?;
        }
    }
    Ok(String::from_utf8(out).expect("serde_json writes UTF-8"))
}

struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(float(value).as_bytes())
    }
}

struct Indented<'a>(PrettyFormatter<'a>);

impl Formatter for Indented<'_> {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_array(writer)
    }
    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array(writer)
    }
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_array_value(writer, first)
    }
    fn end_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array_value(writer)
    }
    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object(writer)
    }
    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object(writer)
    }
    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_object_key(writer, first)
    }
    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object_value(writer)
    }
    fn end_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object_value(writer)
    }
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(float(value).as_bytes())
    }
}

/// The shortest digits that parse to the same value, with an exponent below 1e-4 and from 1e16 on.
fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    match scientific.split_once('e').and_then(|(digits, exponent)| Some((digits, exponent.parse::<i32>().ok()?))) {
        Some((digits, exponent)) if value != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_line_has_spaces_after_commas_and_colons() {
        let value = json!({"b": [1, 2.5, null, true], "a": {"é": "<b>\n\"\u{1F44D}"}, "e": [], "o": {}});
        let want = r#"{"b": [1, 2.5, null, true], "a": {"é": "<b>\n\"👍"}, "e": [], "o": {}}"#;
        assert_eq!(dumps(&value, None).unwrap(), want);
    }

    #[test]
    fn indented_lines_follow_python() {
        let want = "{\n    \"a\": [\n        1,\n        2\n    ],\n    \"e\": []\n}";
        assert_eq!(dumps(&json!({"a": [1, 2], "e": []}), Some(4)).unwrap(), want);
    }

    #[test]
    fn floats_look_as_in_python() {
        let cases = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-1.5e-7, "-1.5e-07"),
            (0.0, "0.0"),
            (1.25e100, "1.25e+100"),
        ];
        for (value, want) in cases {
            assert_eq!(dumps(&value, None).unwrap(), want);
        }
    }
}
