//! `Table`: a table whose rows come one by one.
//!
//! The first row decides the columns' widths, so each later row is printed when it is complete, and is aligned: what is
//! longer than its column continues below, within the column.

use unicode_width::UnicodeWidthChar;

use super::inline;
use super::style::{Span, Style};

const COLUMN_MIN: usize = 3;
const SEPARATOR: &str = " │ ";
const SEPARATOR_COLUMNS: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alignment {
    Left,
    Center,
    Right,
}

pub struct Table {
    header: Vec<String>,
    alignments: Vec<Alignment>,
    /// Set by the first row.
    widths: Vec<usize>,
    /// The columns that there are for the table.
    room: usize,
}

impl Table {
    /// `header` and `delimiter` are the first two lines. `None` if they begin no table that fits into `room` columns.
    pub fn new(header: &str, delimiter: &str, room: usize) -> Option<Self> {
        let (header, alignments) = (cells(header), alignments(delimiter)?);
        let fits = (COLUMN_MIN + SEPARATOR_COLUMNS) * header.len() <= room;
        (header.len() == alignments.len() && fits).then(|| Self { header, alignments, widths: Vec::new(), room })
    }

    /// The lines of a row. Those of the header come before the first one.
    pub fn row(&mut self, row: &str) -> Vec<String> {
        let mut cells = cells(row);
        cells.resize(self.header.len(), String::new());
        let mut lines = self.begin(&cells);
        lines.extend(self.lines(&cells, Style::PLAIN));
        lines
    }

    /// The lines that are left when the table ends: those of the header if there was no row.
    pub fn finish(mut self) -> Vec<String> {
        self.begin(&[])
    }

    fn begin(&mut self, first: &[String]) -> Vec<String> {
        if !self.widths.is_empty() {
            return Vec::new();
        }
        let needed = needed(&self.header, first);
        self.widths = widths(&needed, self.room);
        let mut rule = self.widths.clone();
        let left = self.room - total(&self.widths);
        if self.alignments.ends_with(&[Alignment::Left])
            && let (Some(width), Some(rule), Some(&needed)) = (self.widths.last_mut(), rule.last_mut(), needed.last())
        {
            // Nothing is at the right of this column, so it has all the room that is left.
            *rule = needed.min(*width);
            *width += left;
        }
        let mut lines = self.lines(&self.header, Style::BOLD);
        let rule: Vec<_> = rule.into_iter().map(|width| "─".repeat(width)).collect();
        lines.push(Style::DIM.paint(&rule.join("─┼─")));
        lines
    }

    fn lines(&self, cells: &[String], style: Style) -> Vec<String> {
        let cells: Vec<Vec<CellLine>> =
            cells.iter().zip(&self.widths).map(|(cell, &width)| wrapped(&inline::spans(cell, style), width)).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or_default().max(1);
        (0..height).map(|line| self.line(&cells, line)).collect()
    }

    fn line(&self, cells: &[Vec<CellLine>], line: usize) -> String {
        let (mut out, last) = (String::new(), cells.len() - 1);
        for (index, (cell, &width)) in cells.iter().zip(&self.widths).enumerate() {
            let empty = CellLine::default();
            let text = cell.get(line).unwrap_or(&empty);
            let space = width.saturating_sub(text.columns);
            let before = match self.alignments[index] {
                Alignment::Left => 0,
                Alignment::Center => space / 2,
                Alignment::Right => space,
            };
            out.push_str(&" ".repeat(before));
            out.push_str(&text.text);
            if index < last {
                out.push_str(&" ".repeat(space - before));
                out.push_str(&Style::DIM.paint(SEPARATOR));
            }
        }
        out
    }
}

/// The cells of a line.
pub fn cells(line: &str) -> Vec<String> {
    let line = line.trim();
    let line = line.strip_prefix('|').unwrap_or(line);
    let (mut cells, mut cell, mut is_escaped) = (Vec::new(), String::new(), false);
    for c in line.chars() {
        match c {
            '|' if is_escaped => {
                cell.pop();
                cell.push(c);
            }
            '|' => cells.push(std::mem::take(&mut cell)),
            _ => cell.push(c),
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    if !cell.trim().is_empty() {
        cells.push(cell);
    }
    cells.iter().map(|cell| cell.trim().to_owned()).collect()
}

/// The alignments that the line below a header has; `None` if it is some other line.
fn alignments(line: &str) -> Option<Vec<Alignment>> {
    let alignment = |cell: String| {
        let (left, right) = (cell.starts_with(':'), cell.len() > 1 && cell.ends_with(':'));
        let dashes = cell.trim_matches(':');
        let is_rule = !dashes.is_empty() && dashes.bytes().all(|b| b == b'-');
        is_rule.then_some(match (left, right) {
            (true, true) => Alignment::Center,
            (false, true) => Alignment::Right,
            _ => Alignment::Left,
        })
    };
    let alignments: Vec<_> = cells(line).into_iter().map(alignment).collect::<Option<_>>()?;
    (!alignments.is_empty()).then_some(alignments)
}

/// The columns that header and first row need.
fn needed(header: &[String], first: &[String]) -> Vec<usize> {
    let first = first.iter().map(|cell| columns(cell)).chain(std::iter::repeat(0));
    header.iter().zip(first).map(|(cell, first)| columns(cell).max(first).max(COLUMN_MIN)).collect()
}

/// The widths of columns: as is needed, and some room for longer rows.
fn widths(needed: &[usize], room: usize) -> Vec<usize> {
    // Narrow columns get what they need; the others share the rest.
    let mut order: Vec<usize> = (0..needed.len()).collect();
    order.sort_by_key(|&index| needed[index]);
    let (mut widths, mut left) = (vec![0; needed.len()], room - SEPARATOR_COLUMNS * (needed.len() - 1));
    for (done, &index) in order.iter().enumerate() {
        widths[index] = needed[index].min(left / (needed.len() - done));
        left -= widths[index];
    }
    for width in &mut widths {
        let more = (*width / 2).min(left);
        *width += more;
        left -= more;
    }
    widths
}

/// The columns of a whole line.
fn total(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + SEPARATOR_COLUMNS * (widths.len() - 1)
}

fn columns(cell: &str) -> usize {
    let spans = inline::spans(cell, Style::PLAIN);
    let line_columns = |line: &str| line.chars().map(char_columns).sum();
    let text: String = spans.into_iter().map(|span| span.text).collect();
    text.lines().map(line_columns).max().unwrap_or_default()
}

fn char_columns(c: char) -> usize {
    c.width().unwrap_or_default()
}

/// A line of a cell, with escape sequences, and its columns.
#[derive(Default)]
struct CellLine {
    text: String,
    columns: usize,
}

/// The lines of a cell, each of at most `width` columns.
fn wrapped(spans: &[Span], width: usize) -> Vec<CellLine> {
    let chars: Vec<(char, Style)> =
        spans.iter().flat_map(|span| span.text.chars().map(move |c| (c, span.style))).collect();
    let (mut lines, mut line) = (Vec::new(), Vec::<(char, Style)>::new());
    let columns = |text: &[(char, Style)]| text.iter().map(|&(c, _)| char_columns(c)).sum::<usize>();
    for part in chars.split_inclusive(|&(c, _)| c == '\n') {
        let is_broken = part.last().is_some_and(|&(c, _)| c == '\n');
        let part = &part[..part.len() - usize::from(is_broken)];
        for word in part.split_inclusive(|&(c, _)| c == ' ') {
            let visible = &word[..word.len() - usize::from(word.last().is_some_and(|&(c, _)| c == ' '))];
            if !line.is_empty() && columns(&line) + columns(visible) > width {
                lines.push(std::mem::take(&mut line));
            }
            for &(c, style) in word {
                if columns(&line) + char_columns(c) > width {
                    if c == ' ' {
                        continue;
                    }
                    lines.push(std::mem::take(&mut line));
                }
                line.push((c, style));
            }
        }
        if is_broken {
            lines.push(std::mem::take(&mut line));
        }
    }
    lines.push(line);
    lines.iter().map(|line| cell_line(line)).collect()
}

fn cell_line(chars: &[(char, Style)]) -> CellLine {
    let end = chars.iter().rposition(|&(c, _)| c != ' ').map_or(0, |last| last + 1);
    let (mut line, mut printed) = (CellLine::default(), Style::PLAIN);
    for &(c, style) in &chars[..end] {
        if style != printed {
            line.text.push_str(&style.sequence());
            printed = style;
        }
        line.text.push(c);
        line.columns += char_columns(c);
    }
    if printed != Style::PLAIN {
        line.text.push_str(&Style::PLAIN.sequence());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(room: usize, header: &str, delimiter: &str, rows: &[&str]) -> Vec<String> {
        let mut table = Table::new(header, delimiter, room).unwrap();
        let mut lines: Vec<String> = rows.iter().flat_map(|row| table.row(row)).collect();
        lines.extend(table.finish());
        lines.iter().map(|line| plain(line)).collect()
    }

    /// Without escape sequences.
    fn plain(line: &str) -> String {
        let mut parts = line.split('\u{1b}');
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |text, part| text + part.split_once('m').map_or("", |(_, rest)| rest))
    }

    #[test]
    fn columns_are_aligned() {
        let printed = lines(40, "| a | number |", "|---|---:|", &["| one | 1 |", "| x | **22** |"]);
        assert_eq!(printed, ["a    │    number", "─────┼──────────", "one  │         1", "x    │        22"]);
        let printed = lines(40, "| a | b |", "| :-- | --- |", &["| 日本 | x |", "| y |"]);
        assert_eq!(printed, ["a      │ b", "───────┼────", "日本   │ x", "y      │ "]);
        let printed = lines(40, "|a|b|", "|:-:|-|", &["|`long`|a\\|b|"]);
        assert_eq!(printed, ["  a    │ b", "───────┼────", " long  │ a|b"]);
    }

    #[test]
    fn what_is_longer_than_its_column_continues_below() {
        let printed = lines(20, "| key | text |", "|-|-|", &["| a | one two three four |", "| longer | x<br>y |"]);
        let expected =
            ["key │ text", "────┼───────────────", "a   │ one two three", "    │ four", "lon │ x", "ger │ y"];
        assert_eq!(printed, expected);
    }

    #[test]
    fn a_style_ends_with_the_line_of_its_cell() {
        let cell = wrapped(&inline::spans("**one two**", Style::PLAIN), 4);
        let texts: Vec<_> = cell.iter().map(|line| (line.text.as_str(), line.columns)).collect();
        assert_eq!(texts, [("\u{1b}[0;1mone\u{1b}[0m", 3), ("\u{1b}[0;1mtwo\u{1b}[0m", 3)]);
    }

    #[test]
    fn a_header_without_rows_is_printed_at_the_end() {
        assert_eq!(lines(40, "| a | b |", "|---|---|", &[]), ["a    │ b", "─────┼────"]);
    }

    #[test]
    fn other_lines_begin_no_table() {
        for (header, delimiter, room) in
            [("| a | b |", "|---|", 40), ("| a |", "| b |", 40), ("| a |", "", 40), ("|a|b|c|", "|-|-|-|", 17)]
        {
            assert!(Table::new(header, delimiter, room).is_none(), "{header} {delimiter}");
        }
    }
}
