//! Parses the tokens of a template: its statements. Expressions are in `expression_parser`.

use super::ast::{Argument, Block, ForLoop, MacroDefinition, NamedCall, Parameter, Stmt, StmtKind, Target};
use super::error::Error;
use super::lexer::{Token, TokenKind, tokenize};
use std::sync::Arc;

/// How deep statements and expressions may be nested. Parsing recurses.
const NESTING_MAX: usize = 100;

pub(super) fn parse(source: &str) -> Result<Block, Error> {
    let mut parser = Parser { tokens: tokenize(source)?, at: 0, nesting: 0 };
    let (block, end) = parser.block(&[])?;
    debug_assert!(end.is_empty());
    Ok(block)
}

pub(super) struct Parser {
    tokens: Vec<Token>,
    at: usize,
    nesting: usize,
}

impl Parser {
    pub fn peek(&self) -> &TokenKind {
        &self.tokens[self.at].kind
    }

    pub fn peek_after(&self) -> &TokenKind {
        self.tokens.get(self.at + 1).map_or(&TokenKind::End, |token| &token.kind)
    }

    pub fn line(&self) -> u32 {
        self.tokens[self.at].line
    }

    /// Takes the next token. The last one is never taken.
    pub fn next(&mut self) -> TokenKind {
        if self.at + 1 == self.tokens.len() {
            return TokenKind::End;
        }
        self.at += 1;
        std::mem::replace(&mut self.tokens[self.at - 1].kind, TokenKind::End)
    }

    pub fn error(&self, message: impl AsRef<str>) -> Error {
        Error::syntax(self.line(), message)
    }

    pub fn unexpected(&self, wanted: &str) -> Error {
        let found = match self.peek() {
            TokenKind::Name(name) => format!("{name:?}"),
            TokenKind::Operator(operator) => format!("{operator:?}"),
            TokenKind::Str(_) => "a string".to_owned(),
            TokenKind::Int(_) | TokenKind::Float(_) => "a number".to_owned(),
            TokenKind::End => "the end of the template".to_owned(),
            _ => "the end of the tag".to_owned(),
        };
        self.error(format!("expected {wanted}, found {found}"))
    }

    pub fn is_operator(&self, operator: &str) -> bool {
        matches!(self.peek(), TokenKind::Operator(found) if *found == operator)
    }

    pub fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), TokenKind::Name(found) if found == name)
    }

    /// Takes this operator if it comes next.
    pub fn skip_operator(&mut self, operator: &str) -> bool {
        let found = self.is_operator(operator);
        if found {
            self.next();
        }
        found
    }

    pub fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.next();
        }
        found
    }

    pub fn expect_operator(&mut self, operator: &str) -> Result<(), Error> {
        if self.skip_operator(operator) { Ok(()) } else { Err(self.unexpected(&format!("{operator:?}"))) }
    }

    pub fn name(&mut self) -> Result<Arc<str>, Error> {
        match self.peek() {
            TokenKind::Name(name) => {
                let name = Arc::from(name.as_str());
                self.next();
                Ok(name)
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    /// Parses something one level deeper.
    pub fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.nesting == NESTING_MAX {
            return Err(self.error(format!("it is nested deeper than {NESTING_MAX}")));
        }
        self.nesting += 1;
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    fn end_tag(&mut self) -> Result<(), Error> {
        match self.peek() {
            TokenKind::BlockEnd => {
                self.next();
                Ok(())
            }
            _ => Err(self.unexpected("the end of the tag")),
        }
    }

    /// Statements up to a tag whose name is one of `ends`, or to the end of the template. Returns that name, which is taken.
    fn block(&mut self, ends: &[&str]) -> Result<(Block, String), Error> {
        let mut block = Block::new();
        loop {
            let line = self.line();
            let kind = match self.next() {
                TokenKind::Data(text) => StmtKind::Data(text.into()),
                TokenKind::VariableBegin => {
                    let value = self.tuple()?;
                    if !matches!(self.peek(), TokenKind::VariableEnd) {
                        return Err(self.unexpected("the end of the tag"));
                    }
                    self.next();
                    StmtKind::Emit(value)
                }
                TokenKind::BlockBegin => match self.next() {
                    TokenKind::Name(name) if ends.contains(&name.as_str()) => return Ok((block, name)),
                    TokenKind::Name(name) => self.nested(|parser| parser.statement(&name, line))?,
                    _ => return Err(Error::syntax(line, "a tag has no name")),
                },
                _ if ends.is_empty() => return Ok((block, String::new())),
                _ => {
                    let wanted: Vec<String> = ends.iter().map(|end| format!("`{end}`")).collect();
                    return Err(Error::syntax(line, format!("{} is missing", wanted.join(" or "))));
                }
            };
            block.push(Stmt { line, kind });
        }
    }

    /// A block up to `end`, and that tag.
    fn body(&mut self, end: &str) -> Result<Block, Error> {
        let (body, _) = self.block(&[end])?;
        // `{% endblock name %}` and `{% endmacro name %}` repeat the name.
        if matches!(self.peek(), TokenKind::Name(_)) {
            self.next();
        }
        self.end_tag()?;
        Ok(body)
    }

    fn statement(&mut self, name: &str, line: u32) -> Result<StmtKind, Error> {
        match name {
            "if" => self.conditional(),
            "for" => self.for_loop(),
            "set" => self.set(),
            "macro" => {
                let name = self.name()?;
                let parameters = self.parameters()?;
                self.end_tag()?;
                let body = self.body("endmacro")?;
                Ok(StmtKind::Macro(Arc::new(MacroDefinition { name, parameters, body })))
            }
            "call" => {
                let parameters = if self.is_operator("(") { self.parameters()? } else { Vec::new() };
                let call = self.expression()?;
                self.end_tag()?;
                let body = self.body("endcall")?;
                let caller = Arc::new(MacroDefinition { name: "caller".into(), parameters, body });
                Ok(StmtKind::Call { call, caller })
            }
            "filter" => {
                let mut filters = vec![self.named_call()?];
                while self.skip_operator("|") {
                    filters.push(self.named_call()?);
                }
                self.end_tag()?;
                Ok(StmtKind::Filter { filters, body: self.body("endfilter")? })
            }
            "with" => self.with(),
            "do" => {
                let value = self.tuple()?;
                self.end_tag()?;
                Ok(StmtKind::Do(value))
            }
            "break" | "continue" => {
                self.end_tag()?;
                Ok(if name == "break" { StmtKind::Break } else { StmtKind::Continue })
            }
            // Marks text for training; does not change the output.
            "generation" => {
                self.end_tag()?;
                Ok(StmtKind::Body(self.body("endgeneration")?))
            }
            "block" => {
                self.name()?;
                while matches!(self.peek(), TokenKind::Name(_)) {
                    self.next(); // `scoped`, `required`
                }
                self.end_tag()?;
                Ok(StmtKind::Body(self.body("endblock")?))
            }
            "autoescape" => {
                self.expression()?;
                self.end_tag()?;
                Ok(StmtKind::Body(self.body("endautoescape")?))
            }
            "include" | "import" | "from" | "extends" => Err(Error::syntax(line, "there are no other templates")),
            _ => Err(Error::syntax(line, format!("unknown tag {name:?}"))),
        }
    }

    fn conditional(&mut self) -> Result<StmtKind, Error> {
        let mut arms = Vec::new();
        loop {
            let condition = self.tuple()?;
            self.end_tag()?;
            let (body, end) = self.block(&["elif", "else", "endif"])?;
            arms.push((condition, body));
            match end.as_str() {
                "elif" => {}
                "else" => {
                    self.end_tag()?;
                    return Ok(StmtKind::If { arms, otherwise: self.body("endif")? });
                }
                _ => {
                    self.end_tag()?;
                    return Ok(StmtKind::If { arms, otherwise: Block::new() });
                }
            }
        }
    }

    fn for_loop(&mut self) -> Result<StmtKind, Error> {
        let target = self.target()?;
        if !self.skip_name("in") {
            return Err(self.unexpected("\"in\""));
        }
        let iterable = self.tuple_without_condition()?;
        let condition = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let recursive = self.skip_name("recursive");
        self.end_tag()?;
        let (body, end) = self.block(&["else", "endfor"])?;
        self.end_tag()?;
        let otherwise = if end == "else" { self.body("endfor")? } else { Block::new() };
        Ok(StmtKind::For(Arc::new(ForLoop { target, iterable, condition, recursive, body, otherwise })))
    }

    fn set(&mut self) -> Result<StmtKind, Error> {
        let target = self.target()?;
        if self.skip_operator("=") {
            let value = self.tuple()?;
            self.end_tag()?;
            return Ok(StmtKind::Set { target, value });
        }
        let mut filters = Vec::new();
        while self.skip_operator("|") {
            filters.push(self.named_call()?);
        }
        self.end_tag()?;
        Ok(StmtKind::SetBlock { target, filters, body: self.body("endset")? })
    }

    fn with(&mut self) -> Result<StmtKind, Error> {
        let mut bindings = Vec::new();
        while !matches!(self.peek(), TokenKind::BlockEnd) {
            if !bindings.is_empty() {
                self.expect_operator(",")?;
            }
            let target = self.single_target()?;
            self.expect_operator("=")?;
            bindings.push((target, self.expression()?));
        }
        self.end_tag()?;
        Ok(StmtKind::With { bindings, body: self.body("endwith")? })
    }

    /// `a`, `a.b`, `a, b` or `(a, b)`.
    fn target(&mut self) -> Result<Target, Error> {
        let first = self.single_target()?;
        if !self.is_operator(",") {
            return Ok(first);
        }
        let mut targets = vec![first];
        while self.skip_operator(",") {
            if !matches!(self.peek(), TokenKind::Name(_)) && !self.is_operator("(") || self.is_name("in") {
                break;
            }
            targets.push(self.single_target()?);
        }
        Ok(Target::Tuple(targets))
    }

    fn single_target(&mut self) -> Result<Target, Error> {
        if self.skip_operator("(") {
            let target = self.nested(Self::target)?;
            self.expect_operator(")")?;
            return Ok(target);
        }
        let name = self.name()?;
        if self.skip_operator(".") {
            return Ok(Target::Attribute { namespace: name, name: self.name()? });
        }
        Ok(Target::Name(name))
    }

    fn parameters(&mut self) -> Result<Vec<Parameter>, Error> {
        self.expect_operator("(")?;
        let mut parameters = Vec::new();
        while !self.is_operator(")") {
            if !parameters.is_empty() {
                self.expect_operator(",")?;
                if self.is_operator(")") {
                    break;
                }
            }
            let name = self.name()?;
            let default = if self.skip_operator("=") { Some(self.expression()?) } else { None };
            parameters.push((name, default));
        }
        self.expect_operator(")")?;
        Ok(parameters)
    }

    /// The name and arguments of a filter.
    pub fn named_call(&mut self) -> Result<NamedCall, Error> {
        let name = self.name()?;
        let arguments = if self.skip_operator("(") { self.arguments()? } else { Vec::new() };
        Ok(NamedCall { name, arguments })
    }

    /// Arguments up to the closing parenthesis.
    pub fn arguments(&mut self) -> Result<Vec<Argument>, Error> {
        let mut arguments = Vec::new();
        while !self.is_operator(")") {
            if !arguments.is_empty() {
                self.expect_operator(",")?;
                if self.is_operator(")") {
                    break;
                }
            }
            arguments.push(if self.skip_operator("*") {
                Argument::Positionals(self.expression()?)
            } else if self.skip_operator("**") {
                Argument::Keywords(self.expression()?)
            } else if matches!(self.peek_after(), TokenKind::Operator("=")) {
                let name = self.name()?;
                self.next();
                Argument::Keyword(name, self.expression()?)
            } else {
                Argument::Positional(self.expression()?)
            });
        }
        self.expect_operator(")")?;
        Ok(arguments)
    }
}
