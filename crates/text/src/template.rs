//! Chat templates: render messages to the prompt format that a model was trained on.
//!
//! Templates are Jinja for Hugging Face's environment, which this one emulates. They come with the model, so they are
//! limited in size, steps and output.

use crate::capabilities::TemplateCapabilities;
use crate::message::Message;
use crate::python_json::dumps;
use crate::reply::ReplyFormat;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, State, context};
use serde_json::{Map, Value as Json};
use std::io;
use std::time::SystemTime;

/// The maximum size of a template, of its output, and of its steps.
pub const TEMPLATE_BYTES_MAX: usize = 1 << 20;
pub const RENDERED_BYTES_MAX: usize = 64 << 20;
const STEPS_MAX: u64 = 10_000_000;

#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error("chat template of {bytes} bytes is longer than {TEMPLATE_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("chat template is not valid: {0}")]
    Syntax(String),
    /// The template refused the messages, so the error is the client's.
    #[error("chat template refuses these messages: {0}")]
    Refused(String),
    #[error("chat template failed: {0}")]
    Failed(String),
}

/// The options of rendering, besides the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// End with the start of an assistant message.
    pub add_generation_prompt: bool,
    /// End within the last message, which must be the assistant's, so that the model continues it. Has precedence over
    /// `add_generation_prompt`.
    pub continue_final_message: bool,
    /// Tool definitions in OpenAI's format. If the template does not support tools, they are written into the system prompt.
    pub tools: Vec<Json>,
    /// Further variables, such as `enable_thinking`.
    pub extra: Map<String, Json>,
    /// The current time for the template; `None` uses the clock.
    pub now: Option<SystemTime>,
}

/// A compiled template.
#[derive(Debug)]
pub struct ChatTemplate {
    compiled: CompiledTemplate,
    capabilities: TemplateCapabilities,
    format: ReplyFormat,
}

impl ChatTemplate {
    /// `bos` and `eos` are the begin and end tokens as text; empty if the model has none.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        if source.len() > TEMPLATE_BYTES_MAX {
            return Err(TemplateError::TooLong { bytes: source.len() });
        }
        let mut environment = environment().map_err(|error| TemplateError::Failed(error.to_string()))?;
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|error| TemplateError::Syntax(describe(&error)))?;
        let (bos, eos) = (bos.to_owned(), eos.to_owned());
        let compiled = CompiledTemplate { environment, bos, eos };
        let capabilities = TemplateCapabilities::probe(source, |messages, tools| {
            compiled.render(&messages, &tools, &RenderOptions::default()).ok()
        });
        Ok(Self { compiled, capabilities, format: ReplyFormat::detect(source, capabilities.shows_tools) })
    }

    /// The prompt of a conversation. Encode it without adding special tokens: the template has already written them.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, TemplateError> {
        let (mut messages, tools) = self.capabilities.adapt(messages, &options.tools);
        if !options.continue_final_message {
            return self.compiled.render(&messages, tools, options);
        }
        let last =
            messages.last_mut().filter(|message| message["role"] == "assistant" && message.get("tool_calls").is_none());
        let text = last.and_then(text_of).ok_or_else(|| refused("the final message is no text of the assistant"))?;
        text.push_str(END);
        let options = RenderOptions { add_generation_prompt: false, ..options.clone() };
        let mut text = self.compiled.render(&messages, tools, &options)?;
        let end = text.rfind(END).ok_or_else(|| refused("the final message cannot be continued"))?;
        text.truncate(end);
        Ok(text)
    }

    /// The begin token as text, if the model has one.
    pub fn bos(&self) -> Option<&str> {
        Some(self.compiled.bos.as_str()).filter(|bos| !bos.is_empty())
    }

    /// The end token as text, if the model has one.
    pub fn eos(&self) -> Option<&str> {
        Some(self.compiled.eos.as_str()).filter(|eos| !eos.is_empty())
    }

    /// The format of the model's replies to these prompts.
    pub fn reply_format(&self) -> &ReplyFormat {
        &self.format
    }
}

/// Marks the end of a message that is to be continued.
const END: &str = "\u{e000}b7f3end\u{e000}";

/// The text of a message's content, or of its last part.
fn text_of(message: &mut Json) -> Option<&mut String> {
    let content = match message.get_mut("content")? {
        Json::Array(parts) => parts.last_mut()?.get_mut("text")?,
        content => content,
    };
    match content {
        Json::String(text) => Some(text),
        _ => None,
    }
}

fn refused(why: &str) -> TemplateError {
    TemplateError::Refused(why.to_owned())
}

/// The template itself: renders the messages without adapting them.
#[derive(Debug)]
struct CompiledTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl CompiledTemplate {
    fn render(&self, messages: &[Json], tools: &[Json], options: &RenderOptions) -> Result<String, TemplateError> {
        let now = options.now.unwrap_or_else(SystemTime::now);
        let clock = Value::from_function(move |format: String| strftime(now, &format));
        let tools = if tools.is_empty() { Value::from(()) } else { Value::from(Serde(&tools)) };
        let context = context! {
            messages => Value::from(Serde(&messages)),
            tools => tools,
            add_generation_prompt => options.add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            strftime_now => clock,
        };
        // Variables of the caller have precedence, even over `bos_token`.
        let context = context! { ..Value::from(Serde(&options.extra)), ..context };
        let mut out = BoundedBuffer(Vec::new());
        let failed = |error: &Error| match refusal(error) {
            Some(message) => TemplateError::Refused(message),
            None => TemplateError::Failed(describe(error)),
        };
        let template = self.environment.get_template(NAME).map_err(|error| failed(&error))?;
        template.render_captured_to(context, &mut out).map_err(|error| failed(&error))?;
        String::from_utf8(out.0).map_err(|_| TemplateError::Failed("its text is not UTF-8".to_owned()))
    }
}

const NAME: &str = "chat";

fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let syntax = environment.syntax().to_builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    environment.set_fuel(Some(STEPS_MAX));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", to_json);
    // In Python a string is iterable, and None is not.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(RaisedException(message)))
    });
    Ok(environment)
}

/// `tojson` as Hugging Face defines it. `ensure_ascii`, `separators` and `sort_keys` are accepted.
fn to_json(_state: &State, value: Value, arguments: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    for ignored in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = arguments.get(ignored)?;
    }
    arguments.assert_all_used()?;
    let text = dumps(&value, indent.map(|width| width.min(16)))
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "value has no JSON form").with_source(error))?;
    Ok(Value::from(text))
}

fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let broken = |error: jiff::Error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}"));
    let time = jiff::Timestamp::try_from(now).map_err(broken)?.to_zoned(jiff::tz::TimeZone::system());
    jiff::fmt::strtime::format(format, &time).map_err(broken)
}

/// An exception that the template raised itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedException(String);

fn refusal(error: &Error) -> Option<String> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(RaisedException(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        source = error.source();
    }
    None
}

/// The error with its causes, on one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// `{% generation %}` marks text for training. It does not change the output, and Jinja does not support it.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        // The search for `%}` starts after `{%`, so the percent sign of `{%}` does not end the tag.
        let Some(length) = rest[start + 2..].find("%}") else { break };
        let (tag, after) = rest[start + 2..].split_at(length);
        let word = tag.trim_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => word,
        };
        out += &rest[..start + 2];
        if replacement == word {
            out += tag
        } else {
            out += &tag.replacen(word, replacement, 1)
        }
        out += "%}";
        rest = &after[2..];
    }
    out + rest
}

/// Collects at most `RENDERED_BYTES_MAX`.
struct BoundedBuffer(Vec<u8>);

impl io::Write for BoundedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > RENDERED_BYTES_MAX {
            return Err(io::Error::other(format!("the text is longer than {RENDERED_BYTES_MAX} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Content;
    use serde_json::json;
    use std::time::Duration;

    fn render(source: &str, messages: &[Message], options: &RenderOptions) -> Result<String, TemplateError> {
        ChatTemplate::new(source, "<s>", "</s>")?.render(messages, options)
    }

    fn check(source: &str, want: &str) {
        let got = render(source, &[Message::new("user", "hi")], &RenderOptions::default()).unwrap();
        assert_eq!(got, want);
    }

    #[test]
    fn blocks_leave_no_blank_lines() {
        check(
            "{% for m in messages %}\n  {% if true %}\n{{ m.role }}:{{ m['content'] }}\n  {% endif %}\n{% endfor %}\n",
            "user:hi\n",
        );
        check("{{ bos_token }}x{{ eos_token }}\n", "<s>x</s>");
    }

    #[test]
    fn python_methods_and_loop_controls_work() {
        check("{{ 'a-b'.split('-')[-1].upper() }}{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "Bx1");
        check(
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        );
        check("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3");
        check(
            "{{ ('  x '.strip() ~ 'y') | tojson }}{{ {'b': '<é>', 'a': [1]} | tojson }}",
            r#""xy"{"b": "<é>", "a": [1]}"#,
        );
        check("{{ messages[0].missing is defined }}{{ none is none }}", "FalseTrue");
        check(
            "{{ tools is iterable }}{{ 'x' is iterable }}{{ messages is iterable }}{{ 1 is iterable }}",
            "FalseTrueTrueFalse",
        );
    }

    #[test]
    fn marks_for_training_are_left_out() {
        check("{%- generation -%} x {%- endgeneration %}{% if true %}y{% endif %}", "xy");
        assert!(matches!(ChatTemplate::new("{%}", "", ""), Err(TemplateError::Syntax(_))));
        assert!(matches!(ChatTemplate::new("{%}{% generation %}", "", ""), Err(TemplateError::Syntax(_))));
    }

    #[test]
    fn the_time_is_what_the_caller_says() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_720_000_000);
        let options = RenderOptions { now: Some(now), ..RenderOptions::default() };
        assert_eq!(render("{{ strftime_now('%b %Y') }}", &[], &options).unwrap(), "Jul 2024");
    }

    #[test]
    fn a_refusal_is_told_apart_from_a_mistake_in_the_template() {
        let refused = render("{{ raise_exception('roles must alternate') }}", &[], &RenderOptions::default());
        assert!(matches!(refused, Err(TemplateError::Refused(message)) if message == "roles must alternate"));
        let nested = "{% macro m() %}{{ raise_exception('no') }}{% endmacro %}{{ m() }}";
        assert!(matches!(render(nested, &[], &RenderOptions::default()), Err(TemplateError::Refused(_))));
        let failed = render("{{ nothing.at.all }}", &[], &RenderOptions::default());
        assert!(matches!(failed, Err(TemplateError::Failed(_))));
        assert!(matches!(ChatTemplate::new("{% if %}", "", ""), Err(TemplateError::Syntax(_))));
    }

    #[test]
    fn a_template_that_never_ends_or_grows_without_bound_fails() {
        let endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
        let grows = "{% set x = 'x' * 10000000 %}{% for i in range(100) %}{{ x }}{% endfor %}";
        for source in [endless, grows] {
            let result = render(source, &[], &RenderOptions::default());
            assert!(matches!(result, Err(TemplateError::Failed(_))), "{result:?}");
        }
        let long = " ".repeat(TEMPLATE_BYTES_MAX + 1);
        assert!(matches!(ChatTemplate::new(&long, "", ""), Err(TemplateError::TooLong { .. })));
    }

    #[test]
    fn content_takes_the_form_that_the_template_understands() {
        let parts = Content::Parts(vec![json!({"type": "text", "text": "a"}), json!({"type": "text", "text": "b"})]);
        let parts = Message { content: parts, ..Message::new("user", "") };
        let text_only = "{% for m in messages %}{{ m.content }}{% endfor %}";
        assert_eq!(render(text_only, std::slice::from_ref(&parts), &RenderOptions::default()).unwrap(), "a\nb");
        let parts_only = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}";
        let both = [parts, Message::new("user", "c")];
        assert_eq!(render(parts_only, &both, &RenderOptions::default()).unwrap(), "[a][b][c]");
    }

    #[test]
    fn the_arguments_of_a_tool_call_are_an_object_even_if_they_came_as_text() {
        let call = json!([{"type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]);
        let mut message = Message::new("assistant", "");
        message.extra.insert("tool_calls".to_owned(), call);
        let source = "{{ messages[0].content }}{% if tools %}{{ tools }}{% endif %}{{ messages[0].tool_calls[0].function.arguments.x if messages[0].tool_calls }}";
        assert_eq!(render(source, &[message], &RenderOptions::default()).unwrap(), "1");
    }
}
