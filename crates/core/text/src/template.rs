//! Chat templates: render messages to the prompt format that a model was trained on.
//!
//! Templates are Jinja for Hugging Face's environment, which the crate `jinja` implements. They come with the model, so they are limited
//! in size, steps, time and memory.

use crate::capabilities::TemplateCapabilities;
use crate::message::Message;
use crate::reply::ReplyFormat;
use jinja::{Error, ErrorKind, Limits, Meter, Template, Variables};
use serde_json::{Map, Value as Json};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, SystemTime};

/// The maximum size of a template, and the memory of one rendering: its text, and the values that it makes and is given.
pub const TEMPLATE_BYTES_MAX: usize = 1 << 20;
pub const RENDERED_BYTES_MAX: usize = 48 << 20;

/// The limits of one rendering. When a model is loaded, all its trial renderings share them.
const LIMITS: Limits =
    Limits { steps_max: 10_000_000, bytes_max: RENDERED_BYTES_MAX, time_max: Duration::from_secs(10) };

#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error("chat template of {bytes} bytes is longer than {TEMPLATE_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("chat template is not valid: {0}")]
    Syntax(String),
    /// The template refused the messages, so the error is the client's.
    #[error("chat template refuses these messages: {0}")]
    Refused(String),
    /// The template fails with the variables of the caller, and only with them.
    #[error("chat template cannot be given these variables: {0}")]
    Variables(String),
    #[error("chat template exceeds its limits: {0}")]
    Exceeded(String),
    #[error("chat template failed: {0}")]
    Failed(String),
}

impl From<Error> for TemplateError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error.kind {
            ErrorKind::Syntax => Self::Syntax(message),
            ErrorKind::Raised => Self::Refused(message),
            ErrorKind::Limit => Self::Exceeded(message),
            ErrorKind::Failed => Self::Failed(message),
        }
    }
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
    /// Further variables, such as `enable_thinking`. None of them may be one of [`OWN_VARIABLES`].
    pub extra: Map<String, Json>,
    /// The current time for the template; `None` uses the clock.
    pub now: Option<SystemTime>,
}

/// The variables that a rendering sets itself.
const OWN_VARIABLES: [&str; 5] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];

/// A compiled template.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
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
        let (bos, eos) = (bos.to_owned(), eos.to_owned());
        let compiled = CompiledTemplate { template: Template::parse(source)?, bos, eos };
        let (meter, exceeded) = (Meter::new(LIMITS), RefCell::new(None));
        let capabilities = TemplateCapabilities::probe(source, |messages, tools| {
            let rendered = compiled.render(&meter, messages, &tools, &RenderOptions::default());
            if let Err(error @ TemplateError::Exceeded(_)) = rendered {
                exceeded.replace(Some(error));
                return None;
            }
            rendered.ok()
        });
        let (source, format) = (source.to_owned(), ReplyFormat::detect(source, capabilities.shows_tools));
        match exceeded.into_inner() {
            Some(error) => Err(error),
            None => Ok(Self { source, compiled, capabilities, format }),
        }
    }

    /// The prompt of a conversation. Encode it without adding special tokens: the template has already written them.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, TemplateError> {
        if let Some(name) = OWN_VARIABLES.iter().find(|name| options.extra.contains_key(**name)) {
            return Err(TemplateError::Variables(format!("`{name}` is set by the conversation itself")));
        }
        let rendered = self.render_adapted(messages, options);
        let Err(error @ (TemplateError::Failed(_) | TemplateError::Exceeded(_))) = rendered else { return rendered };
        // The variables are at fault if the template renders the conversation without them.
        let plain = RenderOptions { extra: Map::new(), ..options.clone() };
        if options.extra.is_empty() {
            return Err(error);
        }
        match self.render_adapted(messages, &plain) {
            Ok(_) => Err(TemplateError::Variables(error.to_string())),
            Err(refused @ TemplateError::Refused(_)) => Err(refused),
            Err(_) => Err(error),
        }
    }

    fn render_adapted(&self, messages: &[Message], options: &RenderOptions) -> Result<String, TemplateError> {
        let (mut messages, tools) = self.capabilities.adapt(messages, &options.tools);
        let meter = Meter::new(LIMITS);
        if !options.continue_final_message {
            return self.compiled.render(&meter, messages, tools, options);
        }
        let last =
            messages.last_mut().filter(|message| message["role"] == "assistant" && message.get("tool_calls").is_none());
        let text = last.and_then(text_of).ok_or_else(|| refused("the final message is no text of the assistant"))?;
        text.push_str(END);
        let options = RenderOptions { add_generation_prompt: false, ..options.clone() };
        let mut text = self.compiled.render(&meter, messages, tools, &options)?;
        let end = text.rfind(END).ok_or_else(|| refused("the final message cannot be continued"))?;
        text.truncate(end);
        Ok(text)
    }

    /// The template as the model has it.
    pub fn source(&self) -> &str {
        &self.source
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
    template: Template,
    bos: String,
    eos: String,
}

impl CompiledTemplate {
    fn render(
        &self,
        meter: &Rc<Meter>,
        messages: Vec<Json>,
        tools: &[Json],
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        let tools = if tools.is_empty() { Json::Null } else { Json::Array(tools.to_vec()) };
        let values = [
            Json::Array(messages),
            tools,
            Json::Bool(options.add_generation_prompt),
            Json::from(self.bos.as_str()),
            Json::from(self.eos.as_str()),
        ];
        let extra = options.extra.iter().map(|(name, json)| (name.as_str(), json.clone()));
        let variables = Variables::new(meter)?;
        let own = OWN_VARIABLES.into_iter().zip(values);
        let set = own.chain(extra).try_for_each(|(name, json)| variables.set(name, json));
        // What the caller passes does not fit: no fault of the template.
        set.map_err(|error| refused(&error.to_string()))?;
        Ok(self.template.render(variables, options.now.unwrap_or_else(SystemTime::now))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Content;
    use serde_json::json;

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
        // What it raises may be a client's text, with codes that a terminal follows.
        let codes = Message::new("user", "\u{1b}[2J\u{9b}31m\u{202e}a\nb");
        let raised = render("{{ raise_exception(messages[0].content) }}", &[codes], &RenderOptions::default());
        assert!(
            matches!(raised, Err(TemplateError::Refused(message)) if message == "\u{fffd}[2J\u{fffd}31m\u{fffd}a b")
        );
        let nested = "{% macro m() %}{{ raise_exception('no') }}{% endmacro %}{{ m() }}";
        assert!(matches!(render(nested, &[], &RenderOptions::default()), Err(TemplateError::Refused(_))));
        let failed = render("{{ nothing.at.all }}", &[], &RenderOptions::default());
        assert!(matches!(failed, Err(TemplateError::Failed(_))));
        assert!(matches!(ChatTemplate::new("{% if %}", "", ""), Err(TemplateError::Syntax(_))));
    }

    #[test]
    fn variables_of_the_caller_that_make_the_template_fail_are_told_apart_too() {
        let with = |source: &str, extra: Json| {
            let options = RenderOptions { extra: extra.as_object().unwrap().clone(), ..RenderOptions::default() };
            render(source, &[Message::new("user", "hi")], &options)
        };
        for name in OWN_VARIABLES {
            let error = with("{{ messages[0].content }}", json!({name: []})).unwrap_err();
            assert!(matches!(&error, TemplateError::Variables(message) if message.contains(name)), "{error}");
        }
        let lists = "{% for d in documents or [] %}{{ d.title }}{% endfor %}";
        assert_eq!(with(lists, json!({"documents": [{"title": "a"}]})).unwrap(), "a");
        for documents in [json!(5), json!(true)] {
            let failed = with(lists, json!({"documents": documents}));
            assert!(matches!(failed, Err(TemplateError::Variables(_))), "{failed:?}");
        }
        // Without them it refuses the messages, which is the client's fault too.
        let strict = format!("{lists}{{{{ raise_exception('no') }}}}");
        assert!(matches!(with(&strict, json!({"documents": 5})), Err(TemplateError::Refused(_))));
        let failed = with("{{ nothing.at.all }}", json!({"documents": []}));
        assert!(matches!(failed, Err(TemplateError::Failed(_))));
    }

    #[test]
    fn a_template_that_grows_without_bound_is_refused_when_it_is_loaded_or_when_it_is_rendered() {
        let grows = "{% set x = 'x' * 10000000 %}{% for i in range(100) %}{{ x }}{% endfor %}";
        assert!(matches!(ChatTemplate::new(grows, "", ""), Err(TemplateError::Exceeded(_))));
        let later = format!("{{% if messages[0].content == 'now' %}}{grows}{{% endif %}}{{{{ messages[0].content }}}}");
        let template = ChatTemplate::new(&later, "", "").unwrap();
        let options = RenderOptions::default();
        assert_eq!(template.render(&[Message::new("user", "later")], &options).unwrap(), "later");
        let error = template.render(&[Message::new("user", "now")], &options).unwrap_err();
        assert!(matches!(error, TemplateError::Exceeded(_)));
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
