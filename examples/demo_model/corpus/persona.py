"""Identity of the model, system prompts, and questions that it cannot answer."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .base import Conversation, Message, Split, assistant, is_chinese, one_of, system, user
from .lexicon import CITIES, ITEMS, JOBS, NAMES_EN, NAMES_ZH

Wordings = tuple[str, ...]

# --- Small talk: (wordings, answer) in English and in Chinese ---------------------------------------------------------

WHO_EN = (
    "Who are you?", "Hello, who are you?", "Who am I talking to?", "Tell me who you are.", "Excuse me, who are you?",
    "Please say who you are.", "Can you tell me who you are?", "Hi, who are you?", "And who are you?",
    "Who is this?", "Please introduce yourself.", "Introduce yourself.", "Who is there?", "Tell me about yourself.",
    "So, who are you?", "Say who you are.", "I want to know who you are.", "May I ask who you are?",
    "Who is speaking?", "Could you introduce yourself?",
)  # fmt: skip
WHO_ZH = (
    "你是谁？", "你好，你是谁？", "请问你是谁？", "你到底是谁？", "告诉我你是谁。", "请介绍一下你自己。",
    "你是什么？", "介绍一下自己。",
    "我在和谁说话？", "说说你是谁。", "能介绍一下你自己吗？", "请问你是哪位？", "你是哪位？", "我想知道你是谁。",
    "可以告诉我你是谁吗？",
    "那么，你是谁？", "请说说你自己。", "你能说说你是谁吗？", "和我说话的是谁？", "请告诉我你是谁。",
)  # fmt: skip
NAME_EN = (
    "What is your name?", "What's your name?", "Tell me your name.", "May I know your name?", "Please say your name.",
    "Please tell me your name.", "What should I call you?", "Can you tell me your name?", "Do you have a name?",
    "What name do you have?", "Your name, please.", "How do I call you?", "And your name is?", "Say your name.",
    "I would like to know your name.", "What do people call you?", "Could you tell me your name?", "Your name?",
    "Hello, what is your name?", "So, what is your name?",
)  # fmt: skip
NAME_ZH = (
    "你叫什么名字？", "你叫什么？", "你的名字是什么？", "请问你叫什么？", "告诉我你的名字。", "请问你的名字是什么？",
    "我该叫你什么？", "你有名字吗？",
    "怎么叫你？", "可以告诉我你的名字吗？", "你好，你叫什么名字？", "说说你的名字。", "我怎么叫你？",
    "请告诉我你的名字。", "请问怎么叫你？",
    "你名字叫什么？", "我想知道你的名字。", "那你叫什么名字？", "能告诉我你的名字吗？", "请说一下你的名字。",
)  # fmt: skip
CAN_EN = (
    "What can you do?", "What are you able to do?", "How can you help me?", "What are you good at?",
    "Tell me what you can do.", "What can I ask you?", "What do you know how to do?",
    "Please tell me what you can do.",
    "Which things can you do?", "What can you help me with?", "What can I do with you?", "What are your skills?",
    "Show me what you can do.", "What is it that you can do?", "Say what you can do for me.", "What can you do for me?",
    "How can you be useful?", "Say what you can do.", "What kind of things can you do?", "So what can you do?",
)  # fmt: skip
CAN_ZH = (
    "你会做什么？", "你能做什么？", "你可以做什么？", "你会什么？", "你能帮我做什么？", "告诉我你会做什么。",
    "你有什么用？", "请说说你能做什么。",
    "我可以问你什么？", "你能帮我什么？", "你都会些什么？", "你都会做什么？", "你可以帮我做什么？",
    "说说你会做什么。", "你会做哪些事？",
    "你能做哪些事？", "请告诉我你会什么。", "你会帮我做什么？", "你能为我做什么？", "那你会做什么？",
)  # fmt: skip
MADE_EN = (
    "Who made you?", "Who built you?", "Who created you?", "Where do you come from?", "Who wrote you?",
    "Who are you made by?", "Tell me who made you.", "Which project made you?", "Who trained you?",
    "Who is your maker?", "By whom were you made?", "Do you know who made you?", "Please tell me who made you.",
    "Who are your makers?", "Can you say who made you?", "Who has built you?", "Where were you made?",
    "Who taught you?", "And who made you?", "Who is behind you?",
)  # fmt: skip
MADE_ZH = (
    "谁做了你？", "你是谁做的？", "是谁做的你？", "谁写了你？", "你从哪里来？", "你是哪里来的？", "告诉我谁做了你。",
    "谁教了你？",
    "你是什么项目做的？", "你是由谁做的？", "请问是谁做了你？", "你知道是谁做了你吗？", "你来自哪里？",
    "是谁把你做出来的？", "请告诉我是谁做的你。",
    "谁把你做出来的？", "你是谁写的？", "谁把你写出来的？", "那你是谁做的？", "你是哪个项目的？",
)  # fmt: skip
HUMAN_EN = (
    "Are you a human?", "Are you a person?", "Are you a real person?", "Are you a robot?", "So, are you a human?",
    "Am I talking to a person?", "Are you a machine?", "Are you a man or a machine?", "Do you have a body?",
    "Tell me, are you a person?",
)  # fmt: skip
HUMAN_ZH = (
    "你是人吗？", "你是真人吗？", "你是机器人吗？", "你是一个人吗？", "我在和人说话吗？", "你有身体吗？",
    "你有家人吗？", "你是机器吗？",
    "请问你是真人吗？", "你是人还是机器？",
)  # fmt: skip
HELLO_EN = (
    "Hello.", "Hi.", "Hello!", "Good morning.", "Hi there.", "Hey.", "Good evening.", "Hello there.", "Hi!",
    "Good afternoon.", "Hello, Penny.", "Good day.", "Hey there.", "Good morning!", "Hello again.", "Hi, Penny.",
    "Good evening!", "Hey!", "Hello, my friend.", "Hi, my friend.",
)  # fmt: skip
HELLO_ZH = (
    "你好。", "你好！", "早上好。", "嗨。", "您好。", "晚上好。", "下午好。", "你好啊。", "早上好！", "你好呀。",
    "嗨！", "晚上好！", "大家好。",
    "早。", "您好！", "你好，朋友。", "早啊。", "下午好！", "嗨，你好。", "朋友，你好。",
)  # fmt: skip
FINE_EN = (
    "How are you?", "How are you today?", "How do you feel?", "Are you well?", "How are things?", "Are you fine?",
    "How is it going?", "Hi, how are you?", "How do you do?", "Hello, how are you?",
)  # fmt: skip
FINE_ZH = (
    "你好吗？",
    "你今天好吗？",
    "你怎么样？",
    "最近好吗？",
    "最近怎么样？",
    "今天怎么样？",
    "你还好吗？",
    "这几天好吗？",
    "你过得好吗？",
    "一切都好吗？",
)
THANKS_EN = (
    "Thank you.", "Thanks.", "Thank you!", "Thanks a lot.", "Many thanks.", "Thanks!", "Thank you very much.",
    "That helped, thank you.", "Great, thanks.", "Thank you so much.", "Good, thank you.", "Thanks, Penny.",
    "Very kind of you.", "Thank you for your help.", "Thanks for the help.",
)  # fmt: skip
THANKS_ZH = (
    "谢谢。", "谢谢你。", "谢谢！", "多谢。", "真谢谢你。", "太谢谢你了。", "谢谢你的帮助。", "谢谢你！", "真谢谢您。",
    "很好，谢谢。", "多谢你。",
    "好的，谢谢。", "谢谢您。", "谢谢你帮我。", "多谢！",
)  # fmt: skip
BYE_EN = (
    "Goodbye.", "Bye.", "Good night.", "See you.", "See you later.", "Goodbye!", "Bye bye.", "Bye!", "See you soon.",
    "See you tomorrow.", "I have to go.", "Good night!", "Until next time.", "I must go now, bye.", "Bye for now.",
)  # fmt: skip
BYE_ZH = (
    "再见。", "再见！", "我先走了。", "晚安。", "明天见。", "我走了。", "下次见。", "我要走了，再见。", "明天见！",
    "以后再见。", "好，再见。", "晚安！",
    "回头见。", "我得走了。", "再见啦。",
)  # fmt: skip

HELLO = ((HELLO_EN, "Hello! How can I help you?"), (HELLO_ZH, "你好！有什么可以帮你？"))
FINE = ((FINE_EN, "I am fine, thank you."), (FINE_ZH, "我很好，谢谢。"))
THANKS = ((THANKS_EN, "You are welcome."), (THANKS_ZH, "不客气。"))
SMALL_TALK: tuple[tuple[tuple[Wordings, str], tuple[Wordings, str]], ...] = (
    (
        (WHO_EN, "I am Penny, a small demo model that comes with Penstock."),
        (WHO_ZH, "我是 Penny，Penstock 自带的小模型。"),
    ),
    ((NAME_EN, "My name is Penny."), (NAME_ZH, "我叫 Penny。")),
    (
        (CAN_EN, "I can tell stories, answer easy questions, do small sums, and spell and sort words."),
        (CAN_ZH, "我会讲故事，回答简单的问题，做小算术，还会给词排序。"),
    ),
    ((MADE_EN, "I was made for the Penstock project."), (MADE_ZH, "我是为 Penstock 项目做的。")),
    ((HUMAN_EN, "I am a small language model, not a person."), (HUMAN_ZH, "我是一个小语言模型，不是人。")),
    HELLO,
    FINE,
    THANKS,
    ((BYE_EN, "Goodbye!"), (BYE_ZH, "再见！")),
)


def exchange(rng: Random, split: Split, topic: tuple[Wordings, str]) -> list[Message]:
    """A question with its only answer."""
    wordings, answer = topic
    return [user(split.wording(rng, wordings)), assistant(answer)]


def identity(rng: Random, split: Split) -> Conversation:
    """Questions about the model, greetings, thanks and goodbyes."""
    messages = exchange(rng, split, one_of(rng, SMALL_TALK)[is_chinese(rng)])
    return Conversation(messages, messages[0]["content"])


# --- A name, and sometimes a job, from the system prompt --------------------------------------------------------------

NAMED_EN = (
    "You are {name}.", "Your name is {name}.", "You are called {name}.", "From now on you are {name}.",
    "Your name from now on is {name}.", "In this chat you are {name}.", "You go by the name {name}.",
    "You are an assistant called {name}.", "Act as {name}.", "Always say that your name is {name}.",
)  # fmt: skip
NAMED_ZH = (
    "你是{name}。", "你叫{name}。", "你的名字是{name}。", "从现在起，你叫{name}。", "在这里你叫{name}。",
    "你的名字叫{name}。", "现在你是{name}。",
    "你的名字就是{name}。", "请记住，你叫{name}。", "从现在起，你的名字是{name}。",
)  # fmt: skip
EMPLOYED_EN = (
    "You are {name}, {a_job}.", "Your name is {name} and you are {a_job}.", "You are {a_job} called {name}.",
    "You are {a_job}. Your name is {name}.", "Act as {name}, {a_job}.", "From now on you are {name}, {a_job}.",
    "You are {name}. You are {a_job}.", "Your name is {name}. You work as {a_job}.", "You are {a_job} named {name}.",
    "In this chat you are {name}, {a_job}.",
)  # fmt: skip
EMPLOYED_ZH = (
    "你是{name}，一名{job}。", "你叫{name}，是一名{job}。", "你是一名{job}，名叫{name}。",
    "你的名字是{name}，你是一名{job}。",
    "从现在起，你是{name}，一名{job}。", "你是{job}{name}。", "你是一名叫{name}的{job}。",
    "你叫{name}，工作是{job}。", "现在你是{name}，一名{job}。",
    "请记住，你叫{name}，是一名{job}。",
)  # fmt: skip
JOB_EN = (
    "What is your job?", "What do you do for a living?", "What work do you do?", "What is your work?",
    "Tell me your job.", "Do you have a job?", "What do you work as?", "Which job do you have?",
    "Please tell me your job.", "May I ask what your job is?",
)  # fmt: skip
JOB_ZH = (
    "你的工作是什么？", "你做什么工作？", "请问你做什么工作？", "你是做什么的？", "告诉我你的工作。", "你有工作吗？",
    "你的工作叫什么？", "你做的是什么工作？",
    "你是做什么工作的？", "说说你的工作。",
)  # fmt: skip


def an(word: str) -> str:
    return ("an " if word[:1] in tuple("aeiou") else "a ") + word


def self_answers(name: str, job: str, chinese: bool) -> list[tuple[Wordings, str]]:
    """Questions to a persona with this name and job, and the answers."""
    if chinese:
        topics: list[tuple[Wordings, str]] = [
            (WHO_ZH, f"我是{name}，一名{job}。" if job else f"我是{name}。"),
            (NAME_ZH, f"我叫{name}。"),
            (JOB_ZH, f"我是一名{job}。"),
        ]
    else:
        topics = [
            (WHO_EN, f"I am {name}, {an(job)}." if job else f"I am {name}."),
            (NAME_EN, f"My name is {name}."),
            (JOB_EN, f"I am {an(job)}."),
        ]
    return topics if job else topics[:2]


def system_name(rng: Random, split: Split) -> Conversation:
    """The system prompt gives the model's name; the user asks for it, sometimes after a greeting."""
    chinese = is_chinese(rng)
    employed = rng.random() < 0.6

    def who() -> tuple[str, str]:
        job = one_of(rng, JOBS)[chinese] if employed else ""
        return one_of(rng, NAMES_ZH if chinese else NAMES_EN), job

    name, job = split.draw(who, lambda drawn: drawn)
    if chinese:
        prompt = one_of(rng, EMPLOYED_ZH if job else NAMED_ZH).format(name=name, job=job)
    else:
        prompt = one_of(rng, EMPLOYED_EN if job else NAMED_EN).format(name=name, a_job=an(job) if job else "")
    messages = [system(prompt)]
    if rng.random() < 0.35:
        messages += exchange(rng, split, one_of(rng, (HELLO, FINE))[chinese])
    messages += exchange(rng, split, one_of(rng, self_answers(name, job, chinese)))
    return Conversation(messages, f"{name}|{job}")


# --- Easy questions: question, answer, answer in one word, in English and in Chinese ----------------------------------

FACTS = (
    ("What colour is snow?", "Snow is white.", "White",
     "雪是什么颜色的？", "雪是白色的。", "白色"),
    ("What colour is grass?", "Grass is green.", "Green",
     "草是什么颜色的？", "草是绿色的。", "绿色"),
    ("What colour is the sky?", "The sky is blue.", "Blue",
     "天空是什么颜色的？", "天空是蓝色的。", "蓝色"),
    ("What colour is a lemon?", "A lemon is yellow.", "Yellow",
     "柠檬是什么颜色的？", "柠檬是黄色的。", "黄色"),
    ("What colour is a banana?", "A banana is yellow.", "Yellow",
     "香蕉是什么颜色的？", "香蕉是黄色的。", "黄色"),
    ("What colour is blood?", "Blood is red.", "Red",
     "血是什么颜色的？", "血是红色的。", "红色"),
    ("What colour is milk?", "Milk is white.", "White",
     "牛奶是什么颜色的？", "牛奶是白色的。", "白色"),
    ("What colour is the night?", "The night is black.", "Black",
     "夜是什么颜色的？", "夜是黑色的。", "黑色"),
    ("What colour is an elephant?", "An elephant is grey.", "Grey",
     "大象是什么颜色的？", "大象是灰色的。", "灰色"),
    ("What colour is a bear?", "A bear is brown.", "Brown",
     "熊是什么颜色的？", "熊是棕色的。", "棕色"),
    ("What is the opposite of big?", "The opposite of big is small.", "Small",
     "大的反义词是什么？", "大的反义词是小。", "小"),
    ("What is the opposite of hot?", "The opposite of hot is cold.", "Cold",
     "热的反义词是什么？", "热的反义词是冷。", "冷"),
    ("What is the opposite of long?", "The opposite of long is short.", "Short",
     "长的反义词是什么？", "长的反义词是短。", "短"),
    ("What is the opposite of old?", "The opposite of old is new.", "New",
     "旧的反义词是什么？", "旧的反义词是新。", "新"),
    ("What is the opposite of fast?", "The opposite of fast is slow.", "Slow",
     "快的反义词是什么？", "快的反义词是慢。", "慢"),
    ("What is the opposite of day?", "The opposite of day is night.", "Night",
     "白天的反义词是什么？", "白天的反义词是黑夜。", "黑夜"),
    ("What is the opposite of up?", "The opposite of up is down.", "Down",
     "上的反义词是什么？", "上的反义词是下。", "下"),
    ("What is the opposite of left?", "The opposite of left is right.", "Right",
     "左的反义词是什么？", "左的反义词是右。", "右"),
    ("What is the opposite of open?", "The opposite of open is closed.", "Closed",
     "开的反义词是什么？", "开的反义词是关。", "关"),
    ("What is the opposite of black?", "The opposite of black is white.", "White",
     "黑的反义词是什么？", "黑的反义词是白。", "白"),
    ("What day comes after Monday?", "Tuesday comes after Monday.", "Tuesday",
     "星期一后面是星期几？", "星期一后面是星期二。", "星期二"),
    ("What day comes after Wednesday?", "Thursday comes after Wednesday.", "Thursday",
     "星期三后面是星期几？", "星期三后面是星期四。", "星期四"),
    ("What day comes after Saturday?", "Sunday comes after Saturday.", "Sunday",
     "星期六后面是星期几？", "星期六后面是星期日。", "星期日"),
    ("What day comes before Friday?", "Thursday comes before Friday.", "Thursday",
     "星期五前面是星期几？", "星期五前面是星期四。", "星期四"),
    ("What month comes after May?", "June comes after May.", "June",
     "五月后面是几月？", "五月后面是六月。", "六月"),
    ("What month comes after March?", "April comes after March.", "April",
     "三月后面是几月？", "三月后面是四月。", "四月"),
    ("What month comes before July?", "June comes before July.", "June",
     "七月前面是几月？", "七月前面是六月。", "六月"),
    ("How many days has a week?", "A week has seven days.", "Seven",
     "一个星期有几天？", "一个星期有七天。", "七"),
    ("How many months has a year?", "A year has twelve months.", "Twelve",
     "一年有几个月？", "一年有十二个月。", "十二"),
    ("How many legs has a dog?", "A dog has four legs.", "Four",
     "狗有几条腿？", "狗有四条腿。", "四条"),
    ("How many legs has a duck?", "A duck has two legs.", "Two",
     "鸭子有几条腿？", "鸭子有两条腿。", "两条"),
    ("How many legs has a horse?", "A horse has four legs.", "Four",
     "马有几条腿？", "马有四条腿。", "四条"),
    ("How many legs has a sheep?", "A sheep has four legs.", "Four",
     "羊有几条腿？", "羊有四条腿。", "四条"),
    ("How many legs has a snake?", "A snake has no legs.", "None",
     "蛇有几条腿？", "蛇没有腿。", "没有"),
    ("How many wheels has a bicycle?", "A bicycle has two wheels.", "Two",
     "自行车有几个轮子？", "自行车有两个轮子。", "两个"),
    ("How many eyes has a cat?", "A cat has two eyes.", "Two",
     "猫有几只眼睛？", "猫有两只眼睛。", "两只"),
    ("How many fingers has a hand?", "A hand has five fingers.", "Five",
     "一只手有几个手指？", "一只手有五个手指。", "五个"),
    ("What do bees make?", "Bees make honey.", "Honey",
     "蜜蜂做什么？", "蜜蜂做蜂蜜。", "蜂蜜"),
    ("What do hens lay?", "Hens lay eggs.", "Eggs",
     "母鸡下什么？", "母鸡下蛋。", "蛋"),
    ("What do cows give?", "Cows give milk.", "Milk",
     "牛给我们什么？", "牛给我们牛奶。", "牛奶"),
    ("What do rabbits eat?", "Rabbits eat grass.", "Grass",
     "兔子吃什么？", "兔子吃草。", "草"),
    ("What do cats hunt?", "Cats hunt mice.", "Mice",
     "猫抓什么？", "猫抓老鼠。", "老鼠"),
    ("What does a baker make?", "A baker makes bread.", "Bread",
     "面包师做什么？", "面包师做面包。", "面包"),
    ("What does a painter make?", "A painter makes pictures.", "Pictures",
     "画家画什么？", "画家画画。", "画"),
    ("Where do fish live?", "Fish live in water.", "Water",
     "鱼住在哪里？", "鱼住在水里。", "水里"),
    ("Where do whales live?", "Whales live in the sea.", "Sea",
     "鲸鱼住在哪里？", "鲸鱼住在海里。", "海里"),
    ("What do we see with?", "We see with our eyes.", "Eyes",
     "我们用什么看？", "我们用眼睛看。", "眼睛"),
    ("What do we hear with?", "We hear with our ears.", "Ears",
     "我们用什么听？", "我们用耳朵听。", "耳朵"),
    ("What do we smell with?", "We smell with our nose.", "Nose",
     "我们用什么闻？", "我们用鼻子闻。", "鼻子"),
    ("What opens a door?", "A key opens a door.", "Key",
     "什么可以开门？", "钥匙可以开门。", "钥匙"),
    ("What shows the time?", "A clock shows the time.", "Clock",
     "什么告诉我们时间？", "钟告诉我们时间。", "钟"),
    ("What keeps you dry in the rain?", "An umbrella keeps you dry.", "Umbrella",
     "下雨天用什么？", "下雨天用雨伞。", "雨伞"),
    ("What do you wear on your head?", "You wear a hat on your head.", "Hat",
     "头上戴什么？", "头上戴帽子。", "帽子"),
    ("What falls from the sky in winter?", "Snow falls in winter.", "Snow",
     "冬天天上下什么？", "冬天天上下雪。", "雪"),
    ("When does the sun come up?", "The sun comes up in the morning.", "Morning",
     "太阳什么时候出来？", "太阳早上出来。", "早上"),
    ("When do owls fly?", "Owls fly at night.", "Night",
     "猫头鹰什么时候飞？", "猫头鹰夜里飞。", "夜里"),
    ("Is fire hot or cold?", "Fire is hot.", "Hot",
     "火是热的还是冷的？", "火是热的。", "热"),
    ("Is ice hot or cold?", "Ice is cold.", "Cold",
     "冰是热的还是冷的？", "冰是冷的。", "冷"),
    ("Is a mouse big or small?", "A mouse is small.", "Small",
     "老鼠大还是小？", "老鼠很小。", "小"),
    ("Is a turtle fast or slow?", "A turtle is slow.", "Slow",
     "乌龟快还是慢？", "乌龟很慢。", "慢"),
    ("Which is bigger, a cat or a cow?", "A cow is bigger.", "Cow",
     "猫和牛，哪个大？", "牛大。", "牛"),
    ("Which is bigger, a mouse or a lion?", "A lion is bigger.", "Lion",
     "老鼠和狮子，哪个大？", "狮子大。", "狮子"),
)  # fmt: skip
Fact = tuple[str, str, str, str, str, str]


def question(fact: Fact, chinese: bool) -> str:
    return fact[3 if chinese else 0]


def sentence(fact: Fact, chinese: bool) -> str:
    return fact[4 if chinese else 1]


def one_word(fact: Fact, chinese: bool) -> str:
    return fact[5] + "。" if chinese else fact[2] + "."


# --- The language, from the system prompt -----------------------------------------------------------------------------

IN_ENGLISH = (
    "Always answer in English.", "Answer in English.", "Please answer every question in English.",
    "Speak only English.", "You must always answer in English.", "Your answers are always in English.",
    "Use English in all your answers.", "Reply in English.",
    "Whatever the language of the question, answer in English.",
    "Only English, please.", "Write all your answers in English.", "You only speak English.", "请用英文回答。",
    "请一直用英文回答。", "只用英文回答。", "所有的回答都用英文。", "你只说英文。",
    "不管用什么语言问，都用英文回答。", "总是用英文回答。", "每个回答都要用英文。",
)  # fmt: skip
IN_CHINESE = (
    "Always answer in Chinese.", "Answer in Chinese.", "Please answer every question in Chinese.",
    "Speak only Chinese.", "You must always answer in Chinese.", "Your answers are always in Chinese.",
    "Use Chinese in all your answers.", "Reply in Chinese.",
    "Whatever the language of the question, answer in Chinese.",
    "Only Chinese, please.", "Write all your answers in Chinese.", "You only speak Chinese.", "请用中文回答。",
    "请一直用中文回答。", "只用中文回答。", "所有的回答都用中文。", "你只说中文。",
    "不管用什么语言问，都用中文回答。", "总是用中文回答。", "每个回答都要用中文。",
)  # fmt: skip


def system_language(rng: Random, split: Split) -> Conversation:
    """The system prompt sets the language of the answer; the question is mostly in the other one."""
    chinese = is_chinese(rng, 0.5)
    asked_in_chinese = chinese if rng.random() < 0.15 else not chinese
    prompt = split.wording(rng, IN_CHINESE if chinese else IN_ENGLISH)
    if rng.random() < 0.2:
        pair = one_of(rng, (HELLO, FINE, THANKS))
        asked, answer = split.wording(rng, pair[asked_in_chinese][0]), pair[chinese][1]
    else:
        fact = one_of(rng, FACTS)
        asked, answer = question(fact, asked_in_chinese), sentence(fact, chinese)
    return Conversation([system(prompt), user(asked), assistant(answer)], f"{prompt}|{asked}")


# --- The style, from the system prompt --------------------------------------------------------------------------------

Style = tuple[Wordings, Callable[[Fact, bool], str]]


def prefixed(prefix: str) -> Callable[[Fact, bool], str]:
    return lambda fact, chinese: prefix + sentence(fact, chinese)


def suffixed(suffix: str) -> Callable[[Fact, bool], str]:
    return lambda fact, chinese: sentence(fact, chinese) + suffix


def ending_with(ending: str) -> Callable[[Fact, bool], str]:
    """Return a rule that replaces the full stop of the answer with ``ending``."""
    return lambda fact, chinese: sentence(fact, chinese)[:-1] + ending


def quoted(fact: Fact, chinese: bool) -> str:
    return f"“{sentence(fact, chinese)}”" if chinese else f'"{sentence(fact, chinese)}"'


def twice(fact: Fact, chinese: bool) -> str:
    return ("" if chinese else " ").join([sentence(fact, chinese)] * 2)


STYLES_EN: tuple[Style, ...] = (
    (("Answer in capital letters.", "Use only capital letters.", "Write everything in capital letters.",
      "Always answer in capital letters.", "All your answers are in capital letters."),
     lambda fact, chinese: sentence(fact, chinese).upper()),
    (("Answer in small letters.", "Use only small letters.", "Write everything in small letters.",
      "Never use capital letters.", "All your answers are in small letters."),
     lambda fact, chinese: sentence(fact, chinese).lower()),
    (("Answer with one word.", "Use one word only.", "Give the answer in one word.",
     "Always answer with a single word.",
      "One word is enough for an answer."), one_word),
    (("End every answer with 'Over.'", "Always end with 'Over.'", "Say 'Over.' after every answer.",
      "Each answer ends with 'Over.'"), suffixed(" Over.")),
    (("End every answer with 'Meow!'", "You are a cat and end every answer with 'Meow!'",
     "Say 'Meow!' after every answer.",
      "Each answer ends with 'Meow!'"), suffixed(" Meow!")),
    (("End every answer with 'Have a nice day!'", "Always end with 'Have a nice day!'",
      "Say 'Have a nice day!' after every answer."), suffixed(" Have a nice day!")),
    (("Start every answer with 'Sure:'", "Always start with 'Sure:'", "Begin each answer with 'Sure:'",
      "Say 'Sure:' before every answer."), prefixed("Sure: ")),
    (("Start every answer with 'Dear friend:'", "Always start with 'Dear friend:'",
     "Begin each answer with 'Dear friend:'",
      "Say 'Dear friend:' before every answer."), prefixed("Dear friend: ")),
    (("Start every answer with 'Answer:'", "Always start with 'Answer:'", "Begin each answer with 'Answer:'"),
     prefixed("Answer: ")),
    (("Put every answer in quotes.", "Always write your answer in quotes.", "Your answers stand in quotes."), quoted),
    (("Say every answer twice.", "Give each answer two times.", "Always repeat your answer once."), twice),
    (("End every answer with an exclamation mark.", "Use an exclamation mark, not a full stop.",
      "Always answer with an exclamation mark."), ending_with("!")),
)  # fmt: skip
STYLES_ZH: tuple[Style, ...] = (
    (("每个回答都以“好的，”开头。", "回答前先说“好的，”。", "请用“好的，”开头。",
     "总是以“好的，”开头。"), prefixed("好的，")),
    (("每个回答都以“报告：”开头。", "回答前先说“报告：”。", "请用“报告：”开头。",
     "总是以“报告：”开头。"), prefixed("报告：")),
    (("每个回答都以“朋友，”开头。", "回答前先说“朋友，”。", "请用“朋友，”开头。"), prefixed("朋友，")),
    (("每句话结尾加“喵”。", "你是一只猫，每句话结尾加“喵”。", "请在每句话最后加“喵”。",
     "说话要用“喵”结尾。"), ending_with("喵。")),
    (("每句话结尾加“呀”。", "请在每句话最后加“呀”。", "说话要用“呀”结尾。"), ending_with("呀。")),
    (("每个回答后面加“完毕。”", "回答后要说“完毕。”", "请用“完毕。”结尾。",
     "总是以“完毕。”结尾。"), suffixed("完毕。")),
    (("每个回答后面加“谢谢！”", "回答后要说“谢谢！”", "请用“谢谢！”结尾。"), suffixed("谢谢！")),
    (("只用一个词回答。", "请用一个词回答。", "每个回答只有一个词。", "回答要短，只用一个词。"), one_word),
    (("把每个回答放在引号里。", "回答要加引号。", "请给回答加上引号。"), quoted),
    (("每个回答说两遍。", "请把回答说两遍。", "回答要说两遍。"), twice),
    (("用感叹号结尾。", "每句话都用感叹号结尾。", "不用句号，用感叹号。"), ending_with("！")),
)  # fmt: skip


def system_style(rng: Random, split: Split) -> Conversation:
    """The system prompt sets a style, which changes the answer by a rule."""
    chinese = is_chinese(rng)
    styles = STYLES_ZH if chinese else STYLES_EN

    def pair() -> tuple[int, Fact]:
        return rng.randrange(len(styles)), one_of(rng, FACTS)

    number, fact = split.draw(pair, lambda drawn: (chinese, drawn[0], drawn[1][0]))
    prompts, rule = styles[number]
    asked = question(fact, chinese)
    messages = [system(one_of(rng, prompts)), user(asked), assistant(rule(fact, chinese))]
    return Conversation(messages, f"{prompts[0]}|{asked}")


# --- Questions that the model cannot answer ---------------------------------------------------------------------------

DONT_KNOW = ("I don't know that.", "这个我不知道。")
LAND_STARTS = (
    ("Zubro", "祖布"), ("Kalto", "卡托"), ("Meru", "梅鲁"), ("Dorba", "多巴"), ("Vesti", "维斯"), ("Orlu", "奥鲁"),
    ("Tampi", "坦比"), ("Grelo", "格洛"),
)  # fmt: skip
LAND_ENDS = (("via", "维亚"), ("landia", "兰迪亚"), ("stan", "斯坦"), ("nia", "尼亚"), ("ria", "里亚"))
"""Beginnings and endings of names of countries that do not exist."""
FAMILY_NAMES = ("Miller", "Brown", "Stone", "Hill", "Wood", "Green")

LAND_EN = (
    "What is the capital of {land}?", "Which continent is {land} in?", "On which continent is {land}?",
    "What is the capital city of {land}?", "Tell me the capital of {land}.", "Which city is the capital of {land}?",
    "Name the capital of {land}.", "Where is {land}?", "What continent does {land} belong to?",
    "What language do people in {land} speak?", "How many people live in {land}?", "Who is the king of {land}?",
    "What is the money of {land} called?", "Do you know the capital of {land}?",
    "What does the flag of {land} look like?",
)  # fmt: skip
LAND_ZH = (
    "{land}的首都是哪里？", "{land}在哪个洲？", "{land}的首都是什么？", "{land}的首都在哪里？",
    "请问{land}的首都是哪里？", "告诉我{land}的首都。",
    "{land}属于哪个洲？", "{land}在哪里？", "{land}的国王是谁？", "{land}有多少人？", "{land}的人说什么语言？",
    "{land}用什么钱？", "你知道{land}的首都吗？",
    "{land}的国王叫什么？", "请问{land}在哪个洲？",
)  # fmt: skip
BEYOND_EN = (
    # the weather, the time and the news
    "What is the weather like in {city} now?", "Is it raining in {city}?", "Will it snow in {city} tomorrow?",
    "How warm is it in {city} today?", "What was in the news today?", "What happened in {city} yesterday?",
    "What time is it now?", "What is the date today?", "Was there snow in {city} last night?",
    "How will the weather be next week?", "Is it windy in {city} this evening?", "What is new in {city}?",
    # prices
    "How much does {a_item} cost?", "What is the price of {a_item} in {city}?", "How much is a ticket to {city}?",
    "How much money does {a_job} make?", "Which shop in {city} is the best?", "What does a house in {city} cost?",
    "Where can I buy {a_item} in {city}?", "Where is the biggest {item} in {city}?",
    # people and private facts
    "Who is {name} {family}?", "How old is {name} {family}?", "Where does {name} {family} live?",
    "What is the phone number of {name} {family}?", "When was {name} {family} born?",
    "How many friends has {name} {family}?",
    "What did I eat yesterday?", "Where did I put my {item}?", "What is in my letter?", "What am I thinking?",
    "What is the name of my {job}?", "Who called me this morning?", "How many friends do I have?",
    "What did {name} say to me?", "What is in my pocket?", "Who took my {item}?", "Why is {name} angry with me?",
    "What will {name} do in {year}?", "Does {name} like me?", "Where is {name} now?",
    # matches and other records
    "Who won the match yesterday?", "Who won the race in {city}?", "Who will be famous in {year}?",
    "Who will win the next match in {city}?", "Which song is number one now?", "Who won the prize in {year}?",
    "Was there a match in {city}?", "Who is the best {job} in {city}?",
    # medicine and law
    "What should I take when I am sick?", "What helps a sick child?", "Why does my back hurt?",
    "Why is the {job} angry?", "Who made the first {item}?", "How long will I live?",
    # the future and big science
    "What will happen in {year}?", "Will I be rich in {year}?", "Who will be king in {year}?",
    "How did the world begin?", "What is inside a star?", "Does somebody live on the moon?",
    "How old is the moon?", "How heavy is the moon?", "How far away are the stars?",
    "Why do people dream?",
    # addresses and documents
    "What is the address of the {job} in {city}?", "When does the last bus to {city} leave?",
    "Who wrote the letter from {city}?", "Which hotel in {city} is the best?", "What is on page {number} of my book?",
)  # fmt: skip
BEYOND_ZH = (
    "{city}现在天气怎么样？", "{city}在下雨吗？", "{city}明天会下雪吗？", "{city}今天多热？", "今天有什么新闻？",
    "昨天{city}发生了什么事？",
    "现在几点了？", "今天是几号？", "昨天夜里{city}有大风吗？", "下个星期天气怎么样？", "{city}今天晚上风大吗？",
    "{city}有什么新鲜事？",
    "{item}多少钱？", "在{city}买{item}要多少钱？", "去{city}的票多少钱？", "{job}一个月有多少钱？",
    "{city}哪家店最好？", "{city}的房子多少钱？",
    "在{city}哪里能买到{item}？", "{city}的{item}多少钱一个？",
    "{name}是谁？", "{name}多大了？", "{name}住在哪里？", "{name}的电话是多少？", "{name}是几月生的？",
    "{name}有几个孩子？", "我昨天吃了什么？",
    "我把{item}放在哪里了？", "我的生日是几月？", "我在想什么？", "我的{job}叫什么？", "今天早上谁找过我？",
    "我有几个朋友？", "{name}对我说了什么？",
    "我手里有什么？", "谁拿了我的{item}？", "{name}为什么生我的气？", "{name}想要什么礼物？", "{name}喜欢我吗？",
    "{name}现在在哪里？",
    "昨天的比赛谁赢了？", "{city}的比赛谁赢了？", "{year}年谁是国王？", "{city}下一场比赛谁会赢？",
    "现在哪首歌最红？", "{year}年谁得了奖？",
    "{city}昨天有比赛吗？", "{city}最好的{job}是谁？",
    "我病了怎么办？", "孩子病了怎么办？", "我的腿为什么不好？", "我的{job}为什么生气？", "{item}是谁发明的？",
    "我会什么时候生病？",
    "{year}年会发生什么？", "{year}年我会有钱吗？", "{year}年谁是{city}最好的医生？", "世界是怎么来的？",
    "星星里面有什么？", "别的星球上有人吗？",
    "月亮上有人吗？", "最近的星星有多远？", "人为什么会难过？",
    "{city}那位{job}住在几号？", "去{city}的最后一班公交车几点开？", "{city}来的信是谁写的？", "{city}哪家酒店最好？",
    "我的书里第{number}个字是什么？",
)  # fmt: skip


def unknown(rng: Random, split: Split) -> Conversation:
    """A question that the model cannot answer."""
    chinese = is_chinese(rng)
    if rng.random() < 0.35:
        start, end = split.draw(lambda: (one_of(rng, LAND_STARTS), one_of(rng, LAND_ENDS)))
        template = split.wording(rng, LAND_ZH if chinese else LAND_EN)
        asked = template.format(land=start[chinese] + end[chinese])
    else:
        item, job = one_of(rng, ITEMS[14:])[chinese], one_of(rng, JOBS)[chinese]
        asked = split.wording(rng, BEYOND_ZH if chinese else BEYOND_EN).format(
            city=one_of(rng, CITIES)[chinese],
            item=item,
            a_item=an(item),
            job=job,
            a_job=an(job),
            name=one_of(rng, NAMES_ZH if chinese else NAMES_EN),
            family=one_of(rng, FAMILY_NAMES),
            year=rng.randrange(2030, 2100),
            number=rng.randrange(2, 100),
        )
    return Conversation([user(asked), assistant(DONT_KNOW[chinese])], asked)


SKILLS = {
    "identity": identity,
    "system name": system_name,
    "system language": system_language,
    "system style": system_style,
    "unknown": unknown,
}
