//! `YamlNode`: the part of YAML that topologies are written in: mappings and lists, as blocks or in brackets, of plain or quoted
//! scalars in one line. Anchors, tags and texts of several lines are errors, so no document grows when it is read.

/// How deep nodes may lie in each other.
const DEPTH_MAX: usize = 16;
/// Keys of one mapping.
const KEYS_MAX: usize = 4096;

/// A node and its line, counted from 1.
#[derive(Debug, PartialEq, Eq)]
pub struct YamlNode {
    pub line: usize,
    pub value: YamlValue,
}

#[derive(Debug, PartialEq, Eq)]
pub enum YamlValue {
    /// Nothing follows a key.
    Empty,
    Scalar(String),
    List(Vec<YamlNode>),
    /// No key is there twice.
    Mapping(Vec<(String, YamlNode)>),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct YamlError {
    pub line: usize,
    pub problem: String,
}

impl YamlNode {
    pub fn parse(text: &str) -> Result<Self, YamlError> {
        let mut lines = Vec::new();
        for (index, text) in text.lines().enumerate() {
            let line = Line::new(index + 1, text)?;
            let is_start = line.text == "---" && lines.is_empty();
            if !line.text.is_empty() && !is_start {
                lines.push(line);
            }
        }
        let mut rest = &lines[..];
        let indent = lines.first().map_or(0, |line| line.indent);
        let node = block(&mut rest, indent, 0)?;
        match rest.first() {
            Some(line) => Err(line.error("it is indented otherwise than the lines before")),
            None => Ok(node),
        }
    }

    /// The value of a key; `None` in what is no mapping.
    pub fn get(&self, key: &str) -> Option<&Self> {
        let YamlValue::Mapping(entries) = &self.value else { return None };
        entries.iter().find(|(name, _)| name == key).map(|(_, node)| node)
    }
}

/// A line without its indentation and its comment.
#[derive(Clone, Copy)]
struct Line<'a> {
    number: usize,
    indent: usize,
    text: &'a str,
}

impl<'a> Line<'a> {
    fn new(number: usize, text: &'a str) -> Result<Self, YamlError> {
        let inner = text.trim_start_matches(' ');
        let line = Self { number, indent: text.len() - inner.len(), text: without_comment(inner).trim_end() };
        match line.text.starts_with('\t') {
            true => Err(line.error("it is indented with a tab; YAML takes spaces")),
            false => Ok(line),
        }
    }

    fn error(&self, problem: &str) -> YamlError {
        YamlError { line: self.number, problem: problem.to_owned() }
    }

    /// Checks that a mapping with these entries may have a further key.
    fn check_key(&self, key: &str, entries: &[(String, YamlNode)]) -> Result<(), YamlError> {
        if entries.len() >= KEYS_MAX {
            return Err(self.error(&format!("more than {KEYS_MAX} keys")));
        }
        match entries.iter().any(|(other, _)| other == key) {
            true => Err(self.error(&format!("duplicate key {key:?}"))),
            false => Ok(()),
        }
    }

    /// What follows the hyphen of a list's entry.
    fn entry(&self) -> Option<Self> {
        let rest = self.text.strip_prefix('-').filter(|rest| rest.is_empty() || rest.starts_with(' '))?;
        let text = rest.trim_start();
        Some(Self { indent: self.indent + self.text.len() - text.len(), text, ..*self })
    }

    /// A key, and what follows its colon.
    fn key(&self) -> Result<Option<(String, Self)>, YamlError> {
        let mut flow = Flow { line: *self, rest: self.text };
        let is_quoted = self.text.starts_with(['"', '\'']);
        let key = if is_quoted { flow.quoted()? } else { flow.plain(is_colon).to_owned() };
        let Some(value) = flow.rest.strip_prefix(':').filter(|rest| rest.is_empty() || rest.starts_with(' ')) else {
            return Ok(None);
        };
        let text = value.trim_start();
        let indent = self.indent + self.text.len() - text.len();
        Ok(Some((check_plain(self, key, is_quoted)?, Self { indent, text, ..*self })))
    }
}

/// The lines from here on that belong to one node, which is indented by `indent`.
fn block(lines: &mut &[Line<'_>], indent: usize, depth: usize) -> Result<YamlNode, YamlError> {
    let Some(&first) = lines.first() else { return Ok(YamlNode { line: 1, value: YamlValue::Empty }) };
    if depth > DEPTH_MAX {
        return Err(first.error("it is nested too deep"));
    }
    let value = if first.entry().is_some() {
        let mut list = Vec::new();
        while let Some(line) = lines.first().filter(|line| line.indent == indent) {
            let Some(entry) = line.entry() else { break };
            list.push(nested(lines, entry, indent + 1, depth)?);
        }
        YamlValue::List(list)
    } else if first.key()?.is_some() {
        let mut entries: Vec<(String, YamlNode)> = Vec::new();
        while let Some(line) = lines.first().filter(|line| line.indent == indent).copied() {
            let Some((key, value)) = line.key()? else { return Err(line.error("a key and a colon are missing")) };
            line.check_key(&key, &entries)?;
            // A list may stand as far left as its key.
            let is_list = |next: &&Line<'_>| value.text.is_empty() && next.indent == indent && next.entry().is_some();
            let inner = if lines.get(1).filter(is_list).is_some() { indent } else { indent + 1 };
            entries.push((key, nested(lines, value, inner, depth)?));
        }
        YamlValue::Mapping(entries)
    } else {
        *lines = &lines[1..];
        return flow(&first);
    };
    Ok(YamlNode { line: first.number, value })
}

/// What follows a key or a hyphen: in its line, or in the lines below that are indented by `indent` or more.
fn nested(lines: &mut &[Line<'_>], rest: Line<'_>, indent: usize, depth: usize) -> Result<YamlNode, YamlError> {
    let is_entry = lines[0].entry().is_some();
    *lines = &lines[1..];
    if rest.text.is_empty() {
        return match lines.first().filter(|line| line.indent >= indent) {
            Some(line) => block(lines, line.indent, depth + 1),
            None => Ok(YamlNode { line: rest.number, value: YamlValue::Empty }),
        };
    }
    if is_entry && !rest.text.starts_with(['[', '{']) && (rest.entry().is_some() || rest.key()?.is_some()) {
        return Err(rest.error("a list has scalars here, or values in brackets"));
    }
    flow(&rest)
}

/// A value that is the whole of a line.
fn flow(line: &Line<'_>) -> Result<YamlNode, YamlError> {
    let mut flow = Flow { line: *line, rest: line.text };
    let node = if line.text.starts_with(['[', '{', '"', '\'']) { flow.value(0)? } else { flow.scalar(|_| false)? };
    match flow.rest.is_empty() {
        true => Ok(node),
        false => Err(line.error(&format!("{:?} is too much", flow.rest))),
    }
}

/// Reads values within a line.
struct Flow<'a> {
    line: Line<'a>,
    rest: &'a str,
}

impl<'a> Flow<'a> {
    fn value(&mut self, depth: usize) -> Result<YamlNode, YamlError> {
        if depth > DEPTH_MAX {
            return Err(self.line.error("it is nested too deep"));
        }
        let value = if self.take('[') {
            let mut list = Vec::new();
            while !self.take(']') {
                list.push(self.value(depth + 1)?);
                self.separator(']')?;
            }
            YamlValue::List(list)
        } else if self.take('{') {
            let mut entries: Vec<(String, YamlNode)> = Vec::new();
            while !self.take('}') {
                let YamlValue::Scalar(key) = self.scalar(ends_in_brackets)?.value else {
                    return Err(self.line.error("a key is missing"));
                };
                if !self.take(':') {
                    return Err(self.line.error(&format!("the key {key:?} has no colon")));
                }
                self.line.check_key(&key, &entries)?;
                entries.push((key, self.value(depth + 1)?));
                self.separator('}')?;
            }
            YamlValue::Mapping(entries)
        } else {
            return self.scalar(ends_in_brackets);
        };
        Ok(YamlNode { line: self.line.number, value })
    }

    /// A scalar, of which `ends` knows where it ends if it is not quoted.
    fn scalar(&mut self, ends: impl Fn(&str) -> bool) -> Result<YamlNode, YamlError> {
        let is_quoted = self.rest.starts_with(['"', '\'']);
        let text = if is_quoted { self.quoted()? } else { self.plain(ends).to_owned() };
        let text = check_plain(&self.line, text, is_quoted)?;
        let value = if text.is_empty() && !is_quoted { YamlValue::Empty } else { YamlValue::Scalar(text) };
        self.rest = self.rest.trim_start();
        Ok(YamlNode { line: self.line.number, value })
    }

    fn quoted(&mut self) -> Result<String, YamlError> {
        let quote = if self.rest.starts_with('"') { '"' } else { '\'' };
        let mut text = String::new();
        let mut chars = self.rest[1..].char_indices().peekable();
        while let Some((at, c)) = chars.next() {
            match (c, chars.peek().map(|(_, next)| *next)) {
                ('\'', Some('\'')) if quote == '\'' => text.extend(chars.next().map(|(_, quote)| quote)),
                ('\\', Some(escaped @ ('"' | '\\' | '/'))) if quote == '"' => {
                    chars.next();
                    text.push(escaped);
                }
                ('\\', _) if quote == '"' => return Err(self.line.error("it has an escape that is not read here")),
                _ if c == quote => {
                    self.rest = self.rest[1 + at + 1..].trim_start();
                    return Ok(text);
                }
                _ => text.push(c),
            }
        }
        Err(self.line.error("a quotation mark is missing"))
    }

    fn plain(&mut self, ends: impl Fn(&str) -> bool) -> &'a str {
        let end = self.rest.char_indices().map(|(at, _)| at).find(|&at| ends(&self.rest[at..]));
        let (text, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        text.trim_end()
    }

    fn take(&mut self, c: char) -> bool {
        let Some(rest) = self.rest.strip_prefix(c) else { return false };
        self.rest = rest.trim_start();
        true
    }

    /// A comma, or what closes the brackets, which is left.
    fn separator(&mut self, close: char) -> Result<(), YamlError> {
        if self.take(',') || self.rest.starts_with(close) {
            return Ok(());
        }
        Err(self.line.error(&format!("{close:?} is missing")))
    }
}

fn ends_in_brackets(rest: &str) -> bool {
    rest.starts_with([',', ']', '}', '[', '{']) || is_colon(rest)
}

/// Whether a key ends here: a colon in `host:1` is part of the text.
fn is_colon(rest: &str) -> bool {
    rest.strip_prefix(':').is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
}

/// Refuses what would mean something else in YAML.
fn check_plain(line: &Line<'_>, text: String, is_quoted: bool) -> Result<String, YamlError> {
    match text.chars().next().filter(|_| !is_quoted) {
        Some('&' | '*') => Err(line.error("anchors and aliases are not read here")),
        Some(c @ ('!' | '|' | '>' | '%' | '@' | '`' | '?' | '[' | ']' | '{' | '}' | ',')) => {
            Err(line.error(&format!("a text that begins with {c:?} needs quotation marks")))
        }
        _ => Ok(text),
    }
}

/// A comment begins with `#` at the start or after a space, outside of quotation marks.
fn without_comment(text: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        match quote {
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '#' && before == ' ' => return &text[..at],
            // Within a word it is an apostrophe.
            None if matches!(c, '"' | '\'') && matches!(before, ' ' | '[' | '{' | ',') => quote = Some(c),
            None => {}
        }
        before = c;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The node as one line: brackets, and quotation marks around scalars.
    fn shown(node: &YamlNode) -> String {
        match &node.value {
            YamlValue::Empty => "~".to_owned(),
            YamlValue::Scalar(text) => format!("{text:?}"),
            YamlValue::List(list) => format!("[{}]", list.iter().map(shown).collect::<Vec<_>>().join(", ")),
            YamlValue::Mapping(entries) => {
                let entries: Vec<_> = entries.iter().map(|(key, node)| format!("{key}: {}", shown(node))).collect();
                format!("{{{}}}", entries.join(", "))
            }
        }
    }

    #[track_caller]
    fn check(text: &str, expected: &str) {
        assert_eq!(
            YamlNode::parse(text).map(|node| shown(&node)).map_err(|error| error.to_string()),
            Ok(expected.into())
        );
    }

    #[track_caller]
    fn check_refused(text: &str, expected: &str) {
        let error = YamlNode::parse(text).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error:?}, not {expected:?}");
    }

    #[test]
    fn blocks_and_brackets_are_read() {
        check("", "~");
        check("---\n# nothing\na: 1 # one\n\nb:\n", r#"{a: "1", b: ~}"#);
        check("a:\n  b: x y\n  c:\n    - 1\n    - 'it''s'\nd: e", r#"{a: {b: "x y", c: ["1", "it's"]}, d: "e"}"#);
        check("a:\n- 1\n- 2\nb: 3", r#"{a: ["1", "2"], b: "3"}"#);
        check("a: {b: [x, 'y, z', ], c: {}, d: h:1}", r#"{a: {b: ["x", "y, z"], c: {}, d: "h:1"}}"#);
        check("'a: b': \"c # \\\"d\\\"\"\ne: f#g", r#"{a: b: "c # \"d\"", e: "f#g"}"#);
        check("a: don't # so\r\nb:\r\n  -\r\n    c: d\r\n", r#"{a: "don't", b: [{c: "d"}]}"#);
        check("- [a]\n- {b: c}", r#"[["a"], {b: "c"}]"#);
    }

    #[test]
    fn what_is_not_read_is_refused_with_its_line() {
        check_refused("a: 1\na: 2", "line 2: duplicate key \"a\"");
        check_refused("a: {b: 1, b: 2}", "line 1: duplicate key \"b\"");
        check_refused("a:\n    b: 1\n  c: 2", "line 3: it is indented otherwise");
        check_refused("a: 1\nb", "line 2: a key and a colon are missing");
        check_refused("a: &x 1", "line 1: anchors");
        check_refused("a: *x", "line 1: anchors");
        check_refused("a: !tag b", "line 1: a text that begins with '!'");
        check_refused("a: |\n  text", "line 1: a text that begins with '|'");
        check_refused("a: [1, 2", "line 1: ']' is missing");
        check_refused("a: [", "line 1: ']' is missing");
        check_refused("a: {b}", "line 1: the key \"b\" has no colon");
        check_refused("a: 'b", "line 1: a quotation mark is missing");
        check_refused("a: \"\\x41\"", "line 1: it has an escape");
        check_refused("a: [1] 2", "line 1: \"2\" is too much");
        check_refused("a: 'b' c", "line 1: \"c\" is too much");
        check_refused("a: 1\n\tb: 2", "line 2: it is indented with a tab");
        check_refused("- a: 1\n  b: 2", "line 1: a list has scalars here");
        check_refused(&"[".repeat(10_000), "line 1: it is nested too deep");
        let deep: String = (0..100).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect();
        check_refused(&deep, "line 18: it is nested too deep");
    }
}
