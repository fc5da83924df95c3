//! Rewrites a client's Lark grammar to rules of a larger grammar: those of the input of a tool that takes a text.
//!
//! Names get a prefix, so that they do not clash. Most models write the input as a JSON string; the rules then accept what
//! JSON makes of the texts that the grammar accepts. An escape has two characters, and llguidance's lexer looks only one
//! ahead, so expressions that may contain escapes become rules, and so do all terminals.

use crate::grammar::{GrammarError, check_length, lark_literal};
use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Repetition};

/// How a model writes the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InputForm {
    /// As the content of a JSON string.
    Json,
    /// As it is.
    Raw,
}

/// Rules for the texts that `source` accepts. The name of the first one is `prefix`; all others begin with it.
pub(super) fn rules(source: &str, prefix: &str, form: InputForm) -> Result<String, GrammarError> {
    let ignores = source.lines().any(|line| line.trim_start().starts_with("%ignore"));
    let mut rewriter = Rewriter {
        rest: source,
        prefix,
        form,
        ignores,
        in_terminal: false,
        starts_line: true,
        out: String::new(),
        extra: String::new(),
        ignored: Vec::new(),
    };
    rewriter.run()?;
    let Rewriter { out, extra, ignored, .. } = rewriter;
    let start = match ignored.is_empty() {
        true => format!("{prefix}: {prefix}_start"),
        false => format!("{prefix}: {prefix}_i* {prefix}_start\n{prefix}_i: {}", ignored.join(" | ")),
    };
    Ok(format!("{start}\n{out}\n{extra}"))
}

struct Rewriter<'a> {
    rest: &'a str,
    prefix: &'a str,
    form: InputForm,
    /// The grammar ignores some terminals, which may follow any other.
    ignores: bool,
    /// The current definition is that of a terminal, in which nothing is ignored.
    in_terminal: bool,
    /// Only white space is written of the current line.
    starts_line: bool,
    out: String,
    /// The rules of imported terminals.
    extra: String,
    /// The expressions that are ignored.
    ignored: Vec<String>,
}

impl<'a> Rewriter<'a> {
    fn run(&mut self) -> Result<(), GrammarError> {
        while let Some(c) = self.rest.chars().next() {
            match c {
                '#' => _ = self.line(),
                '/' if self.rest.starts_with("//") => _ = self.line(),
                '/' => self.regex()?,
                '"' => self.string()?,
                '%' => self.directive()?,
                '@' | '<' | '&' => return Err(refused(format!("`{c}` cannot be used in the grammar of a tool"))),
                // These prefixes of rules concern only trees.
                '?' | '!' if self.starts_line => _ = self.take(1),
                c if c.is_ascii_alphabetic() || c == '_' => self.word()?,
                c => {
                    self.starts_line = c == '\n' || (self.starts_line && matches!(c, ' ' | '\t'));
                    self.out.push(c);
                    self.take(c.len_utf8());
                }
            }
        }
        Ok(())
    }

    /// The name of a rule or terminal.
    fn word(&mut self) -> Result<(), GrammarError> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let name = self.take(self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len()));
        let is_terminal = name.contains(|c: char| c.is_ascii_uppercase());
        let rule = self.name(name);
        let defines = self.starts_line;
        if defines {
            self.in_terminal = is_terminal;
        }
        if is_terminal && !defines { self.emit_terminal(&rule) } else { self.emit(&rule) }
    }

    /// Writes a terminal. In a rule, what is ignored may follow it.
    fn emit_terminal(&mut self, terminal: &str) -> Result<(), GrammarError> {
        match self.ignores && !self.in_terminal {
            true => self.emit(&format!("({terminal} {}_i*)", self.prefix)),
            false => self.emit(terminal),
        }
    }

    /// Writes a part of a line.
    fn emit(&mut self, text: &str) -> Result<(), GrammarError> {
        self.starts_line = false;
        self.out += text;
        check_length(&self.out)
    }

    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        taken
    }

    /// The rest of the line.
    fn line(&mut self) -> &'a str {
        self.take(self.rest.find('\n').unwrap_or(self.rest.len()))
    }

    /// The name of a rule or terminal as a rule.
    fn name(&self, name: &str) -> String {
        match name.contains(|c: char| c.is_ascii_uppercase()) {
            true => format!("{}_t_{}", self.prefix, name.to_ascii_lowercase()),
            false => format!("{}_{name}", self.prefix),
        }
    }

    /// A string or a range of characters.
    fn string(&mut self) -> Result<(), GrammarError> {
        let (first, ignores_case) = self.string_value()?;
        if let Some(rest) = self.rest.trim_start_matches(' ').strip_prefix("..")
            && rest.trim_start_matches(' ').starts_with('"')
        {
            self.rest = rest.trim_start_matches(' ');
            let last = self.string_value()?.0;
            let mut ends = first.chars().chain(last.chars());
            let (Some(first), Some(last), None) = (ends.next(), ends.next(), ends.next()) else {
                return Err(refused("a range is from one character to another".to_owned()));
            };
            let range = ClassUnicode::new([ClassUnicodeRange::new(first, last)]);
            return self.expression(&Hir::class(Class::Unicode(range)), None);
        }
        if ignores_case {
            return self.regex_of(&regex_syntax::escape(&first), "i");
        }
        self.expression(&Hir::literal(first.into_bytes()), None)
    }

    fn string_value(&mut self) -> Result<(String, bool), GrammarError> {
        let text = self.take(delimited(self.rest, '"').ok_or_else(|| refused("a string does not end".to_owned()))?);
        let value = serde_json::from_str(text).map_err(|error| refused(format!("the string {text}: {error}")))?;
        let ignores_case = self.rest.starts_with('i') && !self.rest[1..].starts_with(|c: char| c.is_alphanumeric());
        if ignores_case {
            self.take(1);
        }
        Ok((value, ignores_case))
    }

    fn regex(&mut self) -> Result<(), GrammarError> {
        let text = self.take(delimited(self.rest, '/').ok_or_else(|| refused("a regex does not end".to_owned()))?);
        let flags = self.take(self.rest.find(|c| !"imslux".contains(c)).unwrap_or(self.rest.len()));
        self.regex_of(&text[1..text.len() - 1].replace("\\/", "/"), flags)
    }

    fn regex_of(&mut self, pattern: &str, flags: &str) -> Result<(), GrammarError> {
        let expression = parse(pattern, flags)?;
        let flags: String = "imsx".chars().filter(|flag| flags.contains(*flag)).collect();
        let source = if flags.is_empty() { pattern.to_owned() } else { format!("(?{flags}){pattern}") };
        self.expression(&expression, Some(&source))
    }

    /// `%import common.LF`, `%import common.LF -> NAME`, `%import common (LF, WS)`, or `%ignore` with a terminal.
    fn directive(&mut self) -> Result<(), GrammarError> {
        let line = self.line();
        let unknown = || refused(format!("`{}` cannot be used in the grammar of a tool", line.trim()));
        if let Some(ignored) = line.strip_prefix("%ignore") {
            if ignored.contains("%ignore") {
                return Err(unknown());
            }
            let mut inner = Rewriter {
                rest: ignored,
                in_terminal: true,
                starts_line: true,
                out: String::new(),
                extra: String::new(),
                ignored: Vec::new(),
                ..*self
            };
            inner.run()?;
            self.ignored.push(inner.out);
            return Ok(());
        }
        let what = line.strip_prefix("%import").and_then(|rest| rest.trim().strip_prefix("common"));
        let what = what.ok_or_else(unknown)?.trim();
        let names: Vec<(&str, &str)> = match what.strip_prefix('.') {
            Some(one) => vec![one.split_once("->").unwrap_or((one, one))],
            None => {
                let list = what.strip_prefix('(').and_then(|list| list.strip_suffix(')')).ok_or_else(unknown)?;
                list.split(',').map(|name| (name, name)).collect()
            }
        };
        for (name, alias) in names {
            let found = COMMON.iter().find(|(common, _)| *common == name.trim()).ok_or_else(unknown)?;
            let body = written(&parse(found.1, "")?, Some(found.1), self.form)?;
            self.extra += &format!("{}: {body}\n", self.name(alias.trim()));
            check_length(&self.extra)?;
        }
        Ok(())
    }

    fn expression(&mut self, expression: &Hir, source: Option<&str>) -> Result<(), GrammarError> {
        let written = written(expression, source, self.form)?;
        self.emit_terminal(&written)
    }
}

/// An expression as the model writes what it accepts. `source` is its regex, if it was one.
fn written(expression: &Hir, source: Option<&str>, form: InputForm) -> Result<String, GrammarError> {
    Ok(match form {
        InputForm::Json if may_be_escaped(expression) => escaped(expression)?.unwrap_or_else(|| "\"\"".to_owned()),
        InputForm::Json | InputForm::Raw => terminal(expression, source),
    })
}

/// Lark's common terminals.
const COMMON: [(&str, &str); 12] = [
    ("LF", r"\n"),
    ("CR", r"\r"),
    ("NEWLINE", r"(\r?\n)+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("WS_INLINE", r"[ \t]+"),
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[a-fA-F0-9]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", r"[+-]?[0-9]+"),
    ("LETTER", "[A-Za-z]"),
    ("WORD", "[A-Za-z]+"),
    ("CNAME", "[_A-Za-z][_A-Za-z0-9]*"),
];

/// The characters that JSON escapes with one letter, and that letter. Other control characters are not accepted.
const ESCAPES: [(char, char); 7] =
    [('"', '"'), ('\\', '\\'), ('\u{8}', 'b'), ('\u{c}', 'f'), ('\n', 'n'), ('\r', 'r'), ('\t', 't')];

/// The bytes up to the second `mark`, which a backslash escapes.
fn delimited(text: &str, mark: char) -> Option<usize> {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '\n' => return None,
            c if c == mark => return Some(at + 1),
            _ => {}
        }
    }
    None
}

fn parse(pattern: &str, flags: &str) -> Result<Hir, GrammarError> {
    let mut builder = ParserBuilder::new();
    builder.case_insensitive(flags.contains('i')).multi_line(flags.contains('m'));
    builder.dot_matches_new_line(flags.contains('s')).ignore_whitespace(flags.contains('x'));
    builder.build().parse(pattern).map_err(|error| refused(format!("the regex /{pattern}/: {error}")))
}

/// An expression as a string or as a regex. A parsed expression prints a class as all its ranges, so `source` is preferred.
fn terminal(expression: &Hir, source: Option<&str>) -> String {
    let regex = match (expression.kind(), source) {
        (HirKind::Literal(text), _) => return lark_literal(&String::from_utf8_lossy(&text.0)),
        (_, Some(source)) => llguidance::regex_to_lark(source, ""),
        (_, None) => llguidance::regex_to_lark(&expression.to_string(), ""),
    };
    format!("/{regex}/")
}

/// Whether a text that the expression accepts may contain a character that JSON escapes.
fn may_be_escaped(expression: &Hir) -> bool {
    let is_special = |c: char| c < ' ' || c == '"' || c == '\\';
    match expression.kind() {
        HirKind::Empty | HirKind::Look(_) => false,
        HirKind::Literal(text) => String::from_utf8_lossy(&text.0).contains(is_special),
        HirKind::Class(class) => {
            let specials = ClassUnicode::new([('\0', '\u{1f}'), ('"', '"'), ('\\', '\\')].map(range));
            let mut class = unicode(class);
            class.intersect(&specials);
            !class.ranges().is_empty()
        }
        HirKind::Repetition(repetition) => may_be_escaped(&repetition.sub),
        HirKind::Capture(capture) => may_be_escaped(&capture.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().any(may_be_escaped),
    }
}

/// The expression for JSON strings; `None` if it accepts only the empty text.
fn escaped(expression: &Hir) -> Result<Option<String>, GrammarError> {
    Ok(match expression.kind() {
        HirKind::Empty => None,
        HirKind::Look(_) => return Err(refused("anchors cannot be used in the grammar of a tool".to_owned())),
        HirKind::Literal(text) => {
            let json = lark_literal(&String::from_utf8_lossy(&text.0));
            Some(lark_literal(&json[1..json.len() - 1]))
        }
        HirKind::Class(class) => Some(one_of(class, "")),
        HirKind::Capture(capture) => escaped(&capture.sub)?,
        HirKind::Repetition(repetition) => repeated(repetition)?,
        HirKind::Concat(parts) => {
            let parts: Vec<Option<String>> = parts.iter().map(escaped).collect::<Result<_, _>>()?;
            Some(format!("({})", parts.into_iter().flatten().collect::<Vec<_>>().join(" ")))
        }
        HirKind::Alternation(parts) => {
            let parts: Vec<Option<String>> = parts.iter().map(escaped).collect::<Result<_, _>>()?;
            let optional = if parts.contains(&None) { "?" } else { "" };
            Some(format!("({}){optional}", parts.into_iter().flatten().collect::<Vec<_>>().join(" | ")))
        }
    })
}

fn repeated(repetition: &Repetition) -> Result<Option<String>, GrammarError> {
    let Repetition { min, max, sub, .. } = repetition;
    let mut inner: &Hir = sub;
    while let HirKind::Capture(capture) = inner.kind() {
        inner = &capture.sub;
    }
    // Several characters at once: a grammar of single characters is slow.
    if let (HirKind::Class(class), 0..=1, None) = (inner.kind(), min, max) {
        return Ok(Some(format!("{}{}", one_of(class, "+"), if *min == 0 { "*" } else { "+" })));
    }
    let Some(sub) = escaped(sub)? else { return Ok(None) };
    let max = max.map_or_else(String::new, |max| max.to_string());
    Ok(Some(format!("({sub}){{{min},{max}}}")))
}

/// One character of a class, or an escape. `repeat` repeats characters that are not escaped.
fn one_of(class: &Class, repeat: &str) -> String {
    let class = unicode(class);
    let has = |c: char| class.ranges().iter().any(|range| (range.start()..=range.end()).contains(&c));
    let letters: String = ESCAPES.iter().filter(|(c, _)| has(*c)).map(|(_, letter)| *letter).collect();
    let mut plain = class.clone();
    plain.difference(&ClassUnicode::new([('\0', '\u{1f}'), ('"', '"'), ('\\', '\\')].map(range)));
    let mut kinds = Vec::new();
    if !plain.ranges().is_empty() {
        let plain = Hir::class(Class::Unicode(plain)).to_string();
        kinds.push(format!("/{}{repeat}/", llguidance::regex_to_lark(&plain, "")));
    }
    if !letters.is_empty() {
        kinds.push(format!(r"/\\[{}]/", letters.replace('\\', r"\\")));
    }
    format!("({})", kinds.join(" | "))
}

fn unicode(class: &Class) -> ClassUnicode {
    match class {
        Class::Unicode(class) => class.clone(),
        Class::Bytes(class) => {
            let ranges = class.ranges().iter().filter(|range| range.end() < 0x80);
            ClassUnicode::new(ranges.map(|bytes| range((bytes.start().into(), bytes.end().into()))))
        }
    }
}

fn range((first, last): (char, char)) -> ClassUnicodeRange {
    ClassUnicodeRange::new(first, last)
}

/// Messages quote the client's grammar, so they are cut.
fn refused(message: String) -> GrammarError {
    const CHARACTERS_MAX: usize = 500;
    GrammarError::Refused(message.chars().take(CHARACTERS_MAX).collect())
}
