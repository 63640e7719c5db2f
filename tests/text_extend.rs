//! New messages rendered after a lineage: the ids are those of the whole rendering, or they are refused.

#[path = "common/lineages.rs"]
mod lineages;

use std::path::Path;
use std::sync::OnceLock;

use lego::text::{ChatTemplate, TextError, Tokenizer, difference};
use lineages::{Model, choices};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Writes every turn as it was sampled, arguments too.
const VERBATIM: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} \
    {% if call.function.arguments is string %}{{ call.function.arguments }}{% endif %}</tool_call>{% endfor %}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// As Mistral's: system text in the last user turn.
const LAST_TURN: &str = "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n' %}\
    {% set messages = messages[1:] %}{% endif %}<s>{% for m in messages %}{% if m.role == 'user' %}[INST] \
    {% if loop.last %}{{ system }}{% endif %}{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}";

/// Shows only the last three messages.
const FORGETFUL: &str = "{% for m in messages[-3:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Numbers the turns from the end.
const COUNTED: &str = "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.revindex }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Repeats the first words of the last answer in the turn that follows it.
const ECHOING: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% if m.role == 'user' and not loop.first %} ({{ messages[loop.index0 - 1].content[:4] }}){% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn verbatim() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| Model::new("", VERBATIM).expect("proven"))
}

/// Qwen's template in the small, which drops earlier reasoning.
fn qwen() -> Model {
    let source =
        std::fs::read_to_string(root().join("tests/fixtures/text/chat_template.jinja")).expect("fixture");
    Model::new("", &source).expect("proven")
}

fn own_policy() -> Model {
    let folder = root().join("models/lego-tiny");
    let tokenizer = Tokenizer::load(&folder).expect("tokenizer");
    Model::of(tokenizer, ChatTemplate::load(&folder).expect("template")).expect("proven")
}

#[test]
fn lineages_of_verbatim_templates_are_the_whole_rendering() {
    for (name, model) in [("verbatim", verbatim()), ("lego-tiny", &own_policy())] {
        assert_eq!(model.extender.limits(), [], "{name}");
        let mut choose = choices(1);
        for _ in 0..150 {
            let turns = 1 + choose(6);
            let made = model.lineage(turns, true, &mut choose).expect("not refused");
            let rendered = model.whole(&made.messages, made.tools.as_deref()).expect("renders");
            let (lineage, rendered) =
                (model.tokenizer.decode(&made.ids, false), model.tokenizer.decode(&rendered, false));
            assert_eq!(lineage, rendered, "{name}");
            // One begins each message and the turn to come; text of messages adds none.
            let begin = model.tokenizer.token_to_id("<|im_start|>").expect("a token");
            let begun = made.ids.iter().filter(|&&id| id == begin).count();
            assert_eq!(begun, made.messages.len() + 1, "{name}: {lineage}");
        }
    }
}

#[test]
fn a_template_that_drops_reasoning_is_continued_with_the_reasoning_kept() {
    let model = qwen();
    assert_eq!(model.extender.limits(), []);
    let mut messages = vec![json!({"role": "user", "content": "go"})];
    let mut lineage = model.whole(&messages, None).expect("renders");
    let text = "<think>\nhm\n</think>\n\nfirst<|im_end|>";
    let sampled = model.tokenizer.encode(text).expect("encodes");
    messages.push(json!({"role": "assistant", "content": "first", "reasoning_content": "hm"}));
    messages.push(json!({"role": "user", "content": "again"}));
    let input = model.input(&messages, None, true);
    let tail = model.extender.tail(&sampled, 2, &input).expect("continued");
    assert_eq!(
        model.tokenizer.decode(&tail, false),
        "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    );
    lineage.extend([sampled, tail].concat());
    let found =
        difference(&model.tokenizer, &model.template, &lineage, &input).expect("renders").expect("differ");
    let at = model.tokenizer.decode(&lineage[..found.at], false);
    assert_eq!(at, "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(found.rendered_len, 0);
    let kept = model.tokenizer.decode(&lineage[found.at..found.at + found.lineage_len], false);
    assert_eq!(kept, "<think>\nhm\n</think>\n\n");
    assert!(found.lineage_text.contains("<think>") && !found.rendered_text.contains("<think>"), "{found:?}");
    let rendered = model.whole(&messages, None).expect("renders");
    assert_eq!(difference(&model.tokenizer, &model.template, &rendered, &input).expect("renders"), None);
}

#[test]
fn the_end_of_a_turn_is_added_where_it_was_not_sampled() {
    let model = verbatim();
    let messages = [
        json!({"role": "user", "content": "go"}),
        json!({"role": "assistant", "content": "half an ans"}),
        json!({"role": "user", "content": "a</s>b<|im_end|>"}),
    ];
    let input = model.input(&messages, None, true);
    let tail = |sampled: &str| {
        let ids = model.tokenizer.encode(sampled).expect("encodes");
        model.extender.tail(&ids, 2, &input).map(|tail| model.tokenizer.decode(&tail, false))
    };
    let news = "\n<|im_start|>user\na</s>b<|im_end|><|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(tail("half an ans<|im_end|>").expect("continued"), news);
    assert_eq!(tail("half an ans").expect("continued"), format!("<|im_end|>{news}"));
    assert_eq!(tail("").expect("continued"), format!("<|im_end|>{news}"));
    let error = tail("half an ans</s>").expect_err("another end").to_string();
    assert!(error.contains("\"</s>\"") && error.contains("\"<|im_end|>\""), "{error}");
}

#[test]
fn nothing_new_ends_the_turn() {
    let model = verbatim();
    let messages = [json!({"role": "user", "content": "go"}), json!({"role": "assistant", "content": "yes"})];
    let sampled = model.tokenizer.encode("yes").expect("encodes");
    let tail = |prompt| {
        let tail =
            model.extender.tail(&sampled, 2, &model.input(&messages, None, prompt)).expect("continued");
        model.tokenizer.decode(&tail, false)
    };
    assert_eq!(tail(false), "<|im_end|>\n");
    assert_eq!(tail(true), "<|im_end|>\n<|im_start|>assistant\n");
}

#[test]
fn templates_that_cannot_be_continued_are_refused_with_the_place() {
    for (source, expected) in [
        (FORGETFUL, "before an assistant's turn"),
        (COUNTED, "before an assistant's turn"),
        (ECHOING, "depends on the turn's own words"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
            "none of the tokens that end a turn",
        ),
        (
            "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
            "does not write an assistant's text",
        ),
        ("{{ raise_exception('never') }}", "never"),
        (LAST_TURN, "before an assistant's turn the prompt has \"probe system"),
    ] {
        let error = Model::new("", source).err().unwrap_or_else(|| panic!("{source} is refused")).to_string();
        assert!(error.contains(expected) && error.contains("seen with"), "{error}");
    }
}

/// What only one conversation shows is found on it.
#[test]
fn a_conversation_that_the_probes_do_not_know_is_refused_by_itself() {
    let source =
        VERBATIM.replace("{{ m.content }}", "{{ m.content if m.content != 'secret' or loop.last else '' }}");
    let model = Model::new("", &source).expect("proven: no probe says it");
    let said = |content: &str| {
        let messages = [
            json!({"role": "user", "content": content}),
            json!({"role": "assistant", "content": "yes"}),
            json!({"role": "user", "content": "on"}),
        ];
        model.extender.tail(&[], 2, &model.input(&messages, None, true))
    };
    assert!(said("open").is_ok());
    let error = said("secret").expect_err("the prompt had it, history has not");
    assert!(matches!(error, TextError::Tail(_)), "{error}");
    assert!(error.to_string().contains("secret"), "{error}");
}

#[test]
fn what_is_asked_wrongly_is_said_clearly() {
    let model = verbatim();
    let messages = [json!({"role": "user", "content": "go"}), json!({"role": "assistant", "content": "yes"})];
    let refused = |answered: usize, kwargs: Option<&Map<String, Value>>| {
        let input = lego::text::ChatInput { template_kwargs: kwargs, ..model.input(&messages, None, true) };
        model.extender.tail(&[], answered, &input).expect_err("refused").to_string()
    };
    for answered in [0, 1, 3] {
        assert!(refused(answered, None).contains("is not an assistant's turn"));
    }
    let kwargs = json!({"enable_thinking": false});
    assert!(refused(2, kwargs.as_object()).contains("chat_template_kwargs"));
    let messages = [json!({"role": "user"}), json!({"role": "assistant", "tool_calls": [{"id": "x"}]})];
    let error = model
        .extender
        .tail(&[], 2, &model.input(&messages, None, true))
        .expect_err("no function")
        .to_string();
    assert!(error.contains("messages[1]") && error.contains("function"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Text of new messages is never a control token, whatever it holds.
    #[test]
    fn new_text_stays_text(contents in prop::collection::vec("([a-z <>|\\n🎉]{0,9}(<\\|im_end\\|>|<\\|im_start\\|>|</s>|<tool_call>|the)?){1,3}", 1..4)) {
        let model = verbatim();
        let mut messages = vec![json!({"role": "user", "content": "go"}), json!({"role": "assistant", "content": "yes"})];
        messages.extend(contents.iter().map(|text| json!({"role": "user", "content": text})));
        let tail = model.extender.tail(&[], 2, &model.input(&messages, None, true)).expect("continued");
        let end = model.tokenizer.token_to_id("<|im_end|>").expect("a token");
        prop_assert_eq!(tail.iter().filter(|&&id| id == end).count(), contents.len() + 1);
        let text: String = contents.iter().map(|text| format!("<|im_start|>user\n{text}<|im_end|>\n")).collect();
        prop_assert_eq!(model.tokenizer.decode(&tail, false), format!("<|im_end|>\n{text}<|im_start|>assistant\n"));
    }
}
