//! Parses expressions, in Jinja's order of precedence.

use super::ast::{Argument, Comparison, Expr, NamedCall, Operator, Step};
use super::error::Error;
use super::lexer::TokenKind;
use super::parser::Parser;

/// Names that cannot be the argument of a test without parentheses.
const KEYWORDS: [&str; 8] = ["and", "or", "not", "if", "else", "in", "is", "recursive"];

impl Parser {
    /// An expression, with a condition after it if there is one: `a if b else c`.
    pub fn expression(&mut self) -> Result<Expr, Error> {
        self.nested(|parser| {
            let value = parser.or()?;
            if !parser.skip_name("if") {
                return Ok(value);
            }
            let condition = Box::new(parser.or()?);
            let otherwise = if parser.skip_name("else") { Some(Box::new(parser.expression()?)) } else { None };
            Ok(Expr::If { condition, then: Box::new(value), otherwise })
        })
    }

    /// An expression, or a tuple without parentheses.
    pub fn tuple(&mut self) -> Result<Expr, Error> {
        self.tuple_of(Self::expression)
    }

    /// The same, but `if` does not belong to it.
    pub fn tuple_without_condition(&mut self) -> Result<Expr, Error> {
        self.tuple_of(|parser| parser.nested(Self::or))
    }

    fn tuple_of(&mut self, part: impl Fn(&mut Self) -> Result<Expr, Error>) -> Result<Expr, Error> {
        let first = part(self)?;
        if !self.is_operator(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip_operator(",") {
            let ends = matches!(self.peek(), TokenKind::VariableEnd | TokenKind::BlockEnd | TokenKind::End);
            if ends || self.is_operator(")") {
                break;
            }
            items.push(part(self)?);
        }
        Ok(Expr::Tuple(items))
    }

    fn or(&mut self) -> Result<Expr, Error> {
        let first = self.and()?;
        if !self.is_name("or") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_name("or") {
            parts.push(self.and()?);
        }
        Ok(Expr::Or(parts))
    }

    fn and(&mut self) -> Result<Expr, Error> {
        let first = self.not()?;
        if !self.is_name("and") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_name("and") {
            parts.push(self.not()?);
        }
        Ok(Expr::And(parts))
    }

    fn not(&mut self) -> Result<Expr, Error> {
        if self.skip_name("not") {
            return Ok(Expr::Not(Box::new(self.nested(Self::not)?)));
        }
        self.comparison()
    }

    fn comparison(&mut self) -> Result<Expr, Error> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        while let Some(comparison) = self.comparison_operator() {
            rest.push((comparison, self.sum()?));
        }
        if rest.is_empty() { Ok(first) } else { Ok(Expr::Compare { first: Box::new(first), rest }) }
    }

    fn comparison_operator(&mut self) -> Option<Comparison> {
        let comparison = match self.peek() {
            TokenKind::Operator("==") => Comparison::Equal,
            TokenKind::Operator("!=") => Comparison::NotEqual,
            TokenKind::Operator("<") => Comparison::Less,
            TokenKind::Operator("<=") => Comparison::LessOrEqual,
            TokenKind::Operator(">") => Comparison::Greater,
            TokenKind::Operator(">=") => Comparison::GreaterOrEqual,
            TokenKind::Name(name) if name == "in" => Comparison::In,
            TokenKind::Name(name) if name == "not" => match self.peek_after() {
                TokenKind::Name(after) if after == "in" => {
                    self.next();
                    Comparison::NotIn
                }
                _ => return None,
            },
            _ => return None,
        };
        self.next();
        Some(comparison)
    }

    fn sum(&mut self) -> Result<Expr, Error> {
        self.arithmetic(Self::concat, &[("+", Operator::Add), ("-", Operator::Subtract)])
    }

    fn concat(&mut self) -> Result<Expr, Error> {
        let first = self.product()?;
        if !self.is_operator("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_operator("~") {
            parts.push(self.product()?);
        }
        Ok(Expr::Concat(parts))
    }

    fn product(&mut self) -> Result<Expr, Error> {
        let operators = [
            ("*", Operator::Multiply),
            ("/", Operator::Divide),
            ("//", Operator::FloorDivide),
            ("%", Operator::Remainder),
        ];
        self.arithmetic(Self::power, &operators)
    }

    fn power(&mut self) -> Result<Expr, Error> {
        self.arithmetic(Self::unary, &[("**", Operator::Power)])
    }

    fn arithmetic(
        &mut self,
        operand: impl Fn(&mut Self) -> Result<Expr, Error>,
        operators: &[(&str, Operator)],
    ) -> Result<Expr, Error> {
        let first = operand(self)?;
        let mut rest = Vec::new();
        while let Some(&(_, operator)) = operators.iter().find(|(text, _)| self.is_operator(text)) {
            self.next();
            rest.push((operator, operand(self)?));
        }
        if rest.is_empty() { Ok(first) } else { Ok(Expr::Arithmetic { first: Box::new(first), rest }) }
    }

    /// Filters and tests apply to the sign too.
    fn unary(&mut self) -> Result<Expr, Error> {
        let value = self.signed()?;
        let mut steps = Vec::new();
        self.accesses(&mut steps)?;
        loop {
            if self.skip_operator("|") {
                steps.push(Step::Filter(self.named_call()?));
            } else if self.skip_name("is") {
                steps.push(self.test()?);
            } else {
                let before = steps.len();
                self.accesses(&mut steps)?;
                if steps.len() == before {
                    break;
                }
            }
        }
        Ok(postfix(value, steps))
    }

    fn signed(&mut self) -> Result<Expr, Error> {
        if self.skip_operator("-") {
            return Ok(Expr::Negative(Box::new(self.nested(Self::signed)?)));
        }
        if self.skip_operator("+") {
            return Ok(Expr::Positive(Box::new(self.nested(Self::signed)?)));
        }
        let value = self.primary()?;
        let mut steps = Vec::new();
        self.accesses(&mut steps)?;
        Ok(postfix(value, steps))
    }

    /// Attributes, items, slices and calls.
    fn accesses(&mut self, steps: &mut Vec<Step>) -> Result<(), Error> {
        loop {
            if self.skip_operator(".") {
                steps.push(match *self.peek() {
                    TokenKind::Int(index) => {
                        self.next();
                        Step::Item(Expr::Int(index))
                    }
                    _ => Step::Attribute(self.name()?),
                });
            } else if self.skip_operator("[") {
                steps.push(self.subscript()?);
            } else if self.skip_operator("(") {
                steps.push(Step::Call(self.arguments()?));
            } else {
                return Ok(());
            }
        }
    }

    fn subscript(&mut self) -> Result<Step, Error> {
        let mut parts: [Option<Expr>; 3] = [None, None, None];
        let mut colons = 0;
        while !self.is_operator("]") {
            if self.skip_operator(":") {
                colons += 1;
            } else if colons < parts.len() && parts[colons].is_none() {
                parts[colons] = Some(self.expression()?);
            } else {
                return Err(self.unexpected("\"]\""));
            }
        }
        self.next();
        match (colons, parts) {
            (0, [Some(index), ..]) => Ok(Step::Item(index)),
            (1..=2, parts) => Ok(Step::Slice(Box::new(parts))),
            _ => Err(self.error("a subscript is malformed")),
        }
    }

    fn test(&mut self) -> Result<Step, Error> {
        let negated = self.skip_name("not");
        let name = self.name()?;
        let arguments = match self.peek() {
            TokenKind::Operator("(") => {
                self.next();
                self.arguments()?
            }
            TokenKind::Name(word) if KEYWORDS.contains(&word.as_str()) => Vec::new(),
            TokenKind::Name(_) | TokenKind::Str(_) | TokenKind::Int(_) | TokenKind::Float(_) => self.test_argument()?,
            TokenKind::Operator("[" | "{") => self.test_argument()?,
            _ => Vec::new(),
        };
        Ok(Step::Test { call: NamedCall { name, arguments }, negated })
    }

    fn test_argument(&mut self) -> Result<Vec<Argument>, Error> {
        let value = self.nested(Self::primary)?;
        let mut steps = Vec::new();
        self.accesses(&mut steps)?;
        Ok(vec![Argument::Positional(postfix(value, steps))])
    }

    fn primary(&mut self) -> Result<Expr, Error> {
        match self.peek() {
            TokenKind::Name(_) => {
                let name = self.name()?;
                Ok(match &*name {
                    "true" | "True" => Expr::Bool(true),
                    "false" | "False" => Expr::Bool(false),
                    "none" | "None" => Expr::None,
                    _ => Expr::Name(name),
                })
            }
            TokenKind::Str(_) => {
                let mut text = String::new();
                while let TokenKind::Str(part) = self.peek() {
                    text += part;
                    self.next();
                }
                Ok(Expr::Str(text.into()))
            }
            &TokenKind::Int(value) => {
                self.next();
                Ok(Expr::Int(value))
            }
            &TokenKind::Float(value) => {
                self.next();
                Ok(Expr::Float(value))
            }
            TokenKind::Operator("(") => {
                self.next();
                if self.skip_operator(")") {
                    return Ok(Expr::Tuple(Vec::new()));
                }
                let value = self.tuple()?;
                self.expect_operator(")")?;
                Ok(value)
            }
            TokenKind::Operator("[") => {
                self.next();
                Ok(Expr::List(self.items("]", Self::expression)?))
            }
            TokenKind::Operator("{") => {
                self.next();
                let pair = |parser: &mut Self| {
                    let key = parser.expression()?;
                    parser.expect_operator(":")?;
                    Ok((key, parser.expression()?))
                };
                Ok(Expr::Dict(self.items("}", pair)?))
            }
            _ => Err(self.unexpected("an expression")),
        }
    }

    /// Items separated by commas, up to `end`.
    fn items<T>(&mut self, end: &str, item: impl Fn(&mut Self) -> Result<T, Error>) -> Result<Vec<T>, Error> {
        let mut items = Vec::new();
        while !self.is_operator(end) {
            if !items.is_empty() {
                self.expect_operator(",")?;
                if self.is_operator(end) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        self.next();
        Ok(items)
    }
}

fn postfix(value: Expr, steps: Vec<Step>) -> Expr {
    if steps.is_empty() { value } else { Expr::Postfix { base: Box::new(value), steps } }
}
