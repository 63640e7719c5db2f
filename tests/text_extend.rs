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
            assert!(made.goes_on, "{name}: what is sampled is what the template writes");
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

/// Where the same text has other ids at the beginning of a text, or behind a control token, tails have those that the
/// whole rendering has there.
#[test]
fn lineages_of_sentencepiece_like_tokenizers_are_the_whole_rendering() {
    let path = root().join("tests/fixtures/text/sentencepiece_like.json");
    let fixture: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(path).expect("fixture")).expect("JSON");
    for (kind, made) in &fixture {
        let folder = tempfile::tempdir().expect("folder");
        let end = made["tokenizer"]["model"]["vocab"]["<|im_end|>"].clone();
        for (file, json) in
            [("tokenizer.json", &made["tokenizer"]), ("config.json", &json!({"eos_token_id": end}))]
        {
            std::fs::write(folder.path().join(file), json.to_string()).expect("writes");
        }
        let template = ChatTemplate::from_source(&format!("<s>{VERBATIM}"), Map::new()).expect("parses");
        let model = Model::of(Tokenizer::load(folder.path()).expect("loads"), template).expect("proven");
        assert_eq!(model.extender.limits(), [], "{kind}");
        let mut choose = choices(3);
        for _ in 0..40 {
            let turns = 1 + choose(4);
            let made = model.lineage(turns, true, &mut choose).expect("not refused");
            let whole = model.whole(&made.messages, made.tools.as_deref()).expect("renders");
            assert_eq!(made.ids, whole, "{kind}: {:?}", made.messages);
        }
    }
}

/// Arguments as text, and null in place of no words: the form in which the template writes a call at all.
#[test]
fn calls_are_given_in_the_form_that_the_template_takes() {
    let source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is none %}\
        {{ '<tool_call>' + m.tool_calls[0].function.arguments + '</tool_call>' }}{% else %}{{ m.content }}{% endif %}\
        <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let model = Model::new("", source).expect("proven");
    let messages = [
        json!({"role": "user", "content": "go"}),
        json!({"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function",
            "function": {"name": "run", "arguments": "{\"a\":  1}"}}]}),
        json!({"role": "tool", "tool_call_id": "1", "content": "done"}),
    ];
    let whole = model.tokenizer.decode(&model.whole(&messages, None).expect("renders"), false);
    assert!(
        whole.contains("<tool_call>{\"a\":  1}</tool_call><|im_end|>\n<|im_start|>tool\ndone"),
        "{whole}"
    );
    let tail = model.extender.tail(&[], 2, &model.input(&messages, None, true)).expect("continued");
    assert!(whole.ends_with(&model.tokenizer.decode(&tail, false)));
    let limits: Vec<&str> = model.extender.limits().iter().map(|limit| limit.form.as_str()).collect();
    assert!(limits.iter().all(|form| form.starts_with("a call with words")), "{limits:?}");
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
        (LAST_TURN, "before an assistant's turn the prompt has \"system probe"),
    ] {
        let error = Model::new("", source).err().unwrap_or_else(|| panic!("{source} is refused")).to_string();
        assert!(error.contains(expected) && error.contains("seen with"), "{error}");
    }
}

/// What only one conversation shows is found on it.
#[test]
fn a_conversation_that_the_probes_do_not_know_is_refused_by_itself() {
    let conversation = |question: &str, answer: &str| {
        [
            json!({"role": "user", "content": question}),
            json!({"role": "assistant", "content": answer}),
            json!({"role": "user", "content": "on"}),
        ]
    };
    let tail =
        |model: &Model, messages: &[Value]| model.extender.tail(&[], 2, &model.input(messages, None, true));
    let refused = |model: &Model, messages: &[Value]| match tail(model, messages) {
        Err(TextError::Tail(why)) => why,
        other => panic!("{other:?}"),
    };
    // A message that is left out when it is history.
    let source =
        VERBATIM.replace("{{ m.content }}", "{{ m.content if m.content != 'secret' or loop.last else '' }}");
    let model = Model::new("", &source).expect("proven: no probe says it");
    assert!(tail(&model, &conversation("open", "yes")).is_ok());
    let why = refused(&model, &conversation("secret", "yes"));
    assert!(why.contains("secret<|im_end|>"), "{why}");
    // An answer that shows in the turn behind it.
    let source = ECHOING.replace("not loop.first", "messages[loop.index0 - 1].content[:4] == 'echo'");
    let model = Model::new("", &source).expect("proven: no probe says it");
    assert!(tail(&model, &conversation("go", "yes")).is_ok());
    let why = refused(&model, &conversation("go", "echo this"));
    assert!(why.contains("depends on the turn's own words") && why.contains("(echo)"), "{why}");
    // A turn that is closed in another way.
    let source = VERBATIM.replace("<|im_end|>", "{{ ' (end)' if m.name else '' }}<|im_end|>");
    let model = Model::new("", &source).expect("proven: no probe has names");
    let mut messages = conversation("go", "yes");
    assert!(tail(&model, &messages).is_ok());
    messages[1]["name"] = json!("x");
    let why = refused(&model, &messages);
    assert!(why.contains("closes the turn with \" (end)\""), "{why}");
}

/// A lineage with a call that the template cannot print goes on: nobody renders that call again.
#[test]
fn a_call_that_the_template_refuses_does_not_end_the_lineage() {
    let source = VERBATIM.replace(
        "{% if call.function.arguments is string %}{{ call.function.arguments }}{% endif %}",
        "{{ call.function.arguments.items() | list | tojson }}",
    );
    let model = Model::new("", &source).expect("proven");
    let messages = [
        json!({"role": "user", "content": "go"}),
        json!({"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function",
            "function": {"name": "run", "arguments": "{broken"}}]}),
        json!({"role": "tool", "tool_call_id": "1", "content": "no such call"}),
    ];
    assert!(model.whole(&messages, None).is_err());
    let tail = model.extender.tail(&[], 2, &model.input(&messages, None, true)).expect("continued");
    let text = model.tokenizer.decode(&tail, false);
    assert_eq!(text, "<|im_end|>\n<|im_start|>tool\nno such call<|im_end|>\n<|im_start|>assistant\n");
}

/// Text of the template's own before the end token is the model's to sample: cut before it, the turn cannot be ended.
#[test]
fn a_turn_that_is_cut_before_its_closing_text_is_refused() {
    let source = VERBATIM.replace(
        "<|im_end|>",
        "{{ '</answer>' if m.role == 'assistant' and not m.tool_calls else '' }}<|im_end|>",
    );
    let model = Model::new("", &source).expect("proven");
    let messages = [
        json!({"role": "user", "content": "go"}),
        json!({"role": "assistant", "content": "yes"}),
        json!({"role": "user", "content": "on"}),
    ];
    let tail = |sampled: &str| {
        let ids = model.tokenizer.encode(sampled).expect("encodes");
        model.extender.tail(&ids, 2, &model.input(&messages, None, true))
    };
    assert!(tail("yes</answer><|im_end|>").is_ok());
    let error = tail("yes").expect_err("refused").to_string();
    assert!(error.contains("cut before the template's \"</answer>\""), "{error}");
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
