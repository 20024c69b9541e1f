"""Skills about words: the calendar, opposites, plurals, colours, kinds of things, short lists, and spelling."""

from __future__ import annotations

from random import Random

from .base import Exchange, Skill, Split, is_chinese, one_of
from .facts import CHINESE_SHARE, ask, capitalised
from .lexicon import ANIMALS, CITIES, COLOURS, ITEMS, JOBS

# ---------------------------------------------------------------------------------------------------------------
# Tables. Pairs are (English, Chinese) unless noted otherwise.

DAYS = (
    ("Monday", "星期一"),
    ("Tuesday", "星期二"),
    ("Wednesday", "星期三"),
    ("Thursday", "星期四"),
    ("Friday", "星期五"),
    ("Saturday", "星期六"),
    ("Sunday", "星期日"),
)
MONTHS = (
    ("January", "一月"),
    ("February", "二月"),
    ("March", "三月"),
    ("April", "四月"),
    ("May", "五月"),
    ("June", "六月"),
    ("July", "七月"),
    ("August", "八月"),
    ("September", "九月"),
    ("October", "十月"),
    ("November", "十一月"),
    ("December", "十二月"),
)
CYCLES = ((("day", "天"), DAYS), (("month", "个月"), MONTHS))
NEIGHBOURS = ((("after", "后"), 1), (("before", "前"), -1))
SHIFTS = ((("tomorrow", "明天"), "will it be", 1), (("yesterday", "昨天"), "was it", -1))
ORDINALS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
)

# Every word is in one pair only, so that it has one opposite.
OPPOSITES_EN = (
    ("hot", "cold"),
    ("big", "small"),
    ("long", "short"),
    ("fast", "slow"),
    ("old", "new"),
    ("happy", "sad"),
    ("light", "dark"),
    ("hard", "soft"),
    ("easy", "difficult"),
    ("rich", "poor"),
    ("full", "empty"),
    ("open", "closed"),
    ("clean", "dirty"),
    ("wet", "dry"),
    ("high", "low"),
    ("deep", "shallow"),
    ("wide", "narrow"),
    ("thick", "thin"),
    ("strong", "weak"),
    ("loud", "quiet"),
    ("early", "late"),
    ("good", "bad"),
    ("true", "false"),
    ("left", "right"),
    ("up", "down"),
    ("in", "out"),
    ("on", "off"),
    ("above", "below"),
    ("before", "after"),
    ("first", "last"),
    ("day", "night"),
    ("black", "white"),
    ("front", "back"),
    ("inside", "outside"),
    ("near", "far"),
    ("same", "different"),
    ("begin", "end"),
    ("start", "stop"),
    ("buy", "sell"),
    ("push", "pull"),
    ("give", "take"),
    ("love", "hate"),
    ("win", "lose"),
    ("laugh", "cry"),
    ("remember", "forget"),
    ("ask", "answer"),
    ("arrive", "leave"),
    ("north", "south"),
    ("east", "west"),
    ("summer", "winter"),
    ("friend", "enemy"),
    ("always", "never"),
    ("many", "few"),
    ("more", "less"),
    ("yes", "no"),
    ("cheap", "expensive"),
    ("safe", "dangerous"),
    ("smooth", "rough"),
    ("tight", "loose"),
    ("alive", "dead"),
    ("awake", "asleep"),
    ("polite", "rude"),
    ("beautiful", "ugly"),
    ("top", "bottom"),
    ("war", "peace"),
    ("rise", "fall"),
    ("come", "go"),
)
OPPOSITES_ZH = (
    ("大", "小"),
    ("长", "短"),
    ("高", "低"),
    ("快", "慢"),
    ("热", "冷"),
    ("胖", "瘦"),
    ("新", "旧"),
    ("多", "少"),
    ("远", "近"),
    ("深", "浅"),
    ("宽", "窄"),
    ("厚", "薄"),
    ("轻", "重"),
    ("软", "硬"),
    ("干", "湿"),
    ("早", "晚"),
    ("开", "关"),
    ("上", "下"),
    ("左", "右"),
    ("前", "后"),
    ("里", "外"),
    ("黑", "白"),
    ("男", "女"),
    ("好", "坏"),
    ("对", "错"),
    ("真", "假"),
    ("美", "丑"),
    ("强", "弱"),
    ("进", "出"),
    ("来", "去"),
    ("买", "卖"),
    ("哭", "笑"),
    ("生", "死"),
    ("松", "紧"),
    ("粗", "细"),
    ("东", "西"),
    ("南", "北"),
    ("高兴", "难过"),
    ("安全", "危险"),
    ("容易", "困难"),
    ("干净", "脏"),
    ("安静", "吵闹"),
    ("开始", "结束"),
    ("朋友", "敌人"),
    ("白天", "黑夜"),
    ("记得", "忘记"),
    ("胜利", "失败"),
    ("勇敢", "胆小"),
)

# (singular, plural), for plurals that the rules of `plural_of` do not give.
IRREGULAR = {
    "child": "children",
    "man": "men",
    "woman": "women",
    "foot": "feet",
    "tooth": "teeth",
    "goose": "geese",
    "mouse": "mice",
    "ox": "oxen",
    "sheep": "sheep",
    "deer": "deer",
    "fish": "fish",
    "leaf": "leaves",
    "wolf": "wolves",
    "knife": "knives",
    "wife": "wives",
    "life": "lives",
    "half": "halves",
    "shelf": "shelves",
    "loaf": "loaves",
    "calf": "calves",
    "thief": "thieves",
    "scarf": "scarves",
    "potato": "potatoes",
    "tomato": "tomatoes",
    "hero": "heroes",
    "snowman": "snowmen",
}
UNCOUNTED = frozenset(("bread", "cheese", "honey", "milk", "tea", "rice"))
MORE_NOUNS = (
    "baby",
    "city",
    "story",
    "family",
    "party",
    "country",
    "lady",
    "berry",
    "dish",
    "brush",
    "glass",
    "class",
    "dress",
    "church",
    "watch",
    "peach",
    "branch",
    "boy",
    "toy",
    "day",
    "house",
    "school",
    "teacher",
    "river",
    "star",
    "bird",
    "egg",
    "car",
    "hand",
    "word",
    "song",
)
NOUNS = (
    *(name for name, _ in ITEMS if name not in UNCOUNTED),
    *(name for name, _ in ANIMALS if name not in IRREGULAR),
    *MORE_NOUNS,
    *(noun for noun in IRREGULAR if noun not in dict(ITEMS)),
)

# Things by English color: (English, Chinese).
THINGS_BY_COLOUR = {
    "red": (
        ("blood", "血"),
        ("a strawberry", "草莓"),
        ("a cherry", "樱桃"),
        ("a fire engine", "消防车"),
        ("a ripe tomato", "熟的西红柿"),
    ),
    "blue": (("the sky", "天空"), ("the sea", "大海"), ("a sapphire", "蓝宝石")),
    "green": (("grass", "草"), ("a frog", "青蛙"), ("a cucumber", "黄瓜"), ("spinach", "菠菜"), ("a leaf", "树叶")),
    "yellow": (("the sun", "太阳"), ("a banana", "香蕉"), ("a lemon", "柠檬"), ("a sunflower", "向日葵")),
    "white": (
        ("snow", "雪"),
        ("milk", "牛奶"),
        ("salt", "盐"),
        ("rice", "米饭"),
        ("a swan", "天鹅"),
        ("a polar bear", "北极熊"),
    ),
    "black": (("coal", "煤"), ("a crow", "乌鸦"), ("the night sky", "夜空")),
    "brown": (("chocolate", "巧克力"), ("a chestnut", "栗子"), ("coffee", "咖啡"), ("a potato", "土豆")),
    "grey": (("an elephant", "大象"), ("a mouse", "老鼠"), ("a rain cloud", "乌云")),
    "orange": (("a carrot", "胡萝卜"), ("a pumpkin", "南瓜")),
    "pink": (("a pig", "猪"), ("a flamingo", "火烈鸟")),
    "purple": (("lavender", "薰衣草"), ("an aubergine", "茄子")),
}
COLOURED = tuple((thing, thing_zh, colour) for colour, things in THINGS_BY_COLOUR.items() for thing, thing_zh in things)

# Members of each kind of thing. Members of a bare kind have no article: "Blue is a colour."
AMBIGUOUS_COLOURS = frozenset(("orange", "silver"))
BARE_KINDS = frozenset(("a colour", "a city", "a drink", "a metal", "a sport", "a month", "a job"))
KINDS = {
    ("an animal", "动物"): ANIMALS,
    ("a job", "职业"): JOBS,
    ("a city", "城市"): CITIES,
    ("a colour", "颜色"): [pair for pair in COLOURS if pair[0] not in AMBIGUOUS_COLOURS],
    ("a month", "月份"): MONTHS,
    ("a fruit", "水果"): (
        ("apple", "苹果"),
        ("pear", "梨"),
        ("lemon", "柠檬"),
        ("banana", "香蕉"),
        ("cherry", "樱桃"),
        ("grape", "葡萄"),
        ("peach", "桃子"),
        ("strawberry", "草莓"),
        ("mango", "芒果"),
    ),
    ("a vegetable", "蔬菜"): (
        ("carrot", "胡萝卜"),
        ("potato", "土豆"),
        ("onion", "洋葱"),
        ("cabbage", "卷心菜"),
        ("cucumber", "黄瓜"),
    ),
    ("a drink", "饮料"): (("tea", "茶"), ("milk", "牛奶"), ("coffee", "咖啡"), ("lemonade", "柠檬水")),
    ("a piece of clothing", "衣物"): (
        ("coat", "外套"),
        ("hat", "帽子"),
        ("shirt", "衬衫"),
        ("glove", "手套"),
        ("scarf", "围巾"),
        ("dress", "裙子"),
    ),
    ("an instrument", "乐器"): (
        ("drum", "鼓"),
        ("guitar", "吉他"),
        ("piano", "钢琴"),
        ("violin", "小提琴"),
        ("flute", "长笛"),
    ),
    ("a tool", "工具"): (("hammer", "锤子"), ("ladder", "梯子"), ("saw", "锯子"), ("drill", "电钻")),
    ("a vehicle", "交通工具"): (
        ("bicycle", "自行车"),
        ("boat", "船"),
        ("train", "火车"),
        ("bus", "公交车"),
        ("car", "汽车"),
    ),
    ("a piece of furniture", "家具"): (("chair", "椅子"), ("table", "桌子"), ("bed", "床"), ("sofa", "沙发")),
    ("a metal", "金属"): (("gold", "金"), ("iron", "铁"), ("copper", "铜")),
    ("a sport", "运动"): (("football", "足球"), ("tennis", "网球"), ("basketball", "篮球")),
}
KIND_NAMES = tuple(KINDS)

POSITIONS = (("first", "第一个"), ("second", "第二个"), ("third", "第三个"), ("last", "最后一个"))
LISTED = (*ITEMS, *ANIMALS)
BY_INITIAL = {
    initial: [word for word, _ in LISTED if word[0] == initial] for initial in {word[0] for word, _ in LISTED}
}

SPELLED = (
    "able acid air all ant apple arm army art baby back bag ball band bank barn base bath bean bear bed bell belt "
    "bird blue boat body bone book box boy bread brown bus cake camp candle car card cat chair cloud coat coin cold "
    "cook corn cow cup dark day deer desk dish dog door dream dress drum duck dust ear east egg end face fall farm "
    "fast fire fish flag floor flower foot fork fox frog fruit game garden gate gift girl glass goat gold grass green "
    "hair hand hat head heart hill home honey horse house ice idea ink iron island jam job juice jump key king kite "
    "knife lake lamp land leaf lemon letter light lion list lock lunch map market meat milk mind mirror money moon "
    "mother mouse music nail name neck nest night nose nurse ocean oil orange oven page paint paper park pen pencil "
    "piano pig plane plant plate pond rabbit rain red rice ring river road rock roof room rose salt sand school sea "
    "seed sheep ship shoe silver sister sky snow song soup spoon spring star stone street sugar summer sun table tea "
    "tiger tower train tree turtle wall water window"
)
WORDS = tuple(SPELLED.split())

# ---------------------------------------------------------------------------------------------------------------
# Wordings. In lists for `ask`, every fifth (the last of each row of five) is held out.

NEIGHBOUR_EN = (
    "Which {unit} comes {relation} {name}?",
    "What {unit} comes {relation} {name}?",
    "What is the {unit} {relation} {name}?",
    "Tell me the {unit} {relation} {name}.",
    "Can you tell me the {unit} that comes {relation} {name}?",
    "Which {unit} is right {relation} {name}?",
    "Name the {unit} that comes {relation} {name}.",
    "the {unit} {relation} {name}?",
    "Do you know which {unit} comes {relation} {name}?",
    "Do you know the name of the {unit} {relation} {name}?",
    "What comes {relation} {name}?",
    "Please tell me which {unit} comes right {relation} {name}.",
    "Can you tell me which {unit} is {relation} {name}?",
    "I am learning the names of the {unit}s. Which one comes {relation} {name}?",
    "I would like to know which {unit} comes right {relation} {name}.",
    "what {unit} is {relation} {name}",
    "Give me the name of the {unit} that comes {relation} {name}.",
    "I have a question: which {unit} is right {relation} {name}?",
    "I would like to know the {unit} {relation} {name}.",
    "Please name the {unit} right {relation} {name}.",
    "Which {unit} do we have {relation} {name}?",
    "What is the name of the {unit} {relation} {name}?",
)
NEIGHBOUR_ZH = (
    "{name}的{relation}一{unit}是什么？",
    "{name}{relation}面是什么？",
    "请告诉我{name}的{relation}一{unit}。",
    "{name}的{relation}面是哪一{unit}？",
    "请告诉我{name}{relation}面是哪一{unit}。",
    "你知道{name}的{relation}一{unit}是什么吗？",
    "请问{name}{relation}面是哪一{unit}？",
    "哪一{unit}在{name}的{relation}面？",
    "我想知道{name}的{relation}一{unit}是什么。",
    "你知道哪一{unit}在{name}{relation}面吗？",
    "{name}的{relation}一{unit}叫什么？",
    "能告诉我{name}{relation}面是什么吗？",
    "说出{name}的{relation}一{unit}。",
    "我有一个问题：{name}的{relation}一{unit}是什么？",
    "请问{name}的{relation}一{unit}叫什么？",
    "{name}的{relation}一{unit}？",
    "紧挨在{name}{relation}面的是什么？",
    "请说出{name}{relation}面的那一{unit}。",
    "{name}{relation}面的那一{unit}是什么？",
    "我想知道{name}{relation}面的那一{unit}叫什么。",
)
SHIFT_EN = (
    "Today is {today}. What day {verb} {shift}?",
    "Today is {today}. Which day {verb} {shift}?",
    "If today is {today}, what day {verb} {shift}?",
    "It is {today} today. What day {verb} {shift}?",
    "If it is {today} today, which day {verb} {shift}?",
    "We have {today} today. Which day {verb} {shift}?",
    "It is {today} today. Which day {verb} {shift}?",
    "today is {today}, what day {verb} {shift}",
    "Today it is {today}. So what day {verb} {shift}?",
    "We have {today} today, so what day {verb} {shift}?",
    "What day {verb} {shift}, if today is {today}?",
    "My friend says that today is {today}. Which day {verb} {shift}?",
    "Today is {today}, so which day {verb} {shift}?",
    "Which day {verb} {shift}, if it is {today} today?",
    "My friend says that it is {today} today. What day {verb} {shift}?",
)
SHIFT_ZH = (
    "今天是{today}，{shift}是星期几？",
    "今天{today}，{shift}星期几？",
    "如果今天是{today}，{shift}是星期几？",
    "今天是{today}。请问{shift}是星期几？",
    "如果今天是{today}，那么{shift}星期几？",
    "今天是{today}。请告诉我{shift}是星期几。",
    "今天是{today}，你知道{shift}是星期几吗？",
    "{shift}是星期几？今天是{today}。",
    "今天{today}，那么{shift}是星期几？",
    "今天{today}，请告诉我{shift}星期几。",
    "我的朋友说今天是{today}，{shift}是星期几？",
    "今天是{today}，能告诉我{shift}是星期几吗？",
    "我想知道{shift}是星期几，今天是{today}。",
    "要是今天是{today}，{shift}是星期几？",
    "我的朋友说今天{today}，那么{shift}是星期几？",
)
MONTH_EN = (
    "Which month is the {ordinal} month of the year?",
    "What is the {ordinal} month of the year?",
    "Tell me the {ordinal} month of the year.",
    "What number is {month} in the year?",
    "Can you tell me which month is the {ordinal} of the year?",
    "Which month is number {number}?",
    "What is month number {number}?",
    "Name the {ordinal} month.",
    "{month} is which month of the year?",
    "I would like to know which month is number {number} in the year.",
    "Do you know which month is the {ordinal}?",
    "month number {number}?",
    "Can you tell me what number {month} is?",
    "What is the number of the month {month}?",
    "Please tell me the number of {month} in the year.",
    "Please name month number {number} of the year.",
    "Which month of the year comes {ordinal}?",
    "I would like to know the number of {month}.",
    "I am learning the names of the months. Which one is the {ordinal}?",
    "I am learning the names of the months. What number is {month}?",
)
MONTH_ZH = (
    "一年的第{number}个月是哪个月？",
    "第{number}个月是几月？",
    "{month}是一年的第几个月？",
    "请告诉我一年的第{number}个月是几月。",
    "请问{month}是第几个月？",
    "请问第{number}个月是哪个月？",
    "{month}是第几个月？",
    "你知道一年的第{number}个月是几月吗？",
    "说出一年的第{number}个月。",
    "你知道{month}是一年的第几个月吗？",
    "哪个月是一年的第{number}个月？",
    "我想知道{month}是一年的第几个月。",
    "能告诉我第{number}个月是几月吗？",
    "一年中第{number}个月叫什么？",
    "我想知道哪个月是第{number}个月。",
    "一年中{month}排在第几？",
    "请说出一年中第{number}个月的名字。",
    "我有一个问题：{month}是第几个月？",
    "在一年中，第{number}个月是哪个月？",
    "我有一个问题：一年的第{number}个月叫什么？",
)
OPPOSITE_EN = (
    "What is the opposite of {word}?",
    "Tell me the opposite of {word}.",
    "opposite of {word}?",
    "Which word means the opposite of {word}?",
    "Can you tell me which word is the opposite of {word}?",
    "What's the opposite of {word}?",
    "Name the opposite of {word}.",
    "Do you know the opposite of {word}?",
    "Give me the opposite of the word {word}.",
    "Please tell me what the opposite of the word {word} is.",
    "{Word}: what is the opposite?",
    "Can you tell me the opposite of {word}?",
    "Which word is the opposite of {word}?",
    "I am learning the word {word}. What is its opposite?",
    "I would like to know which word means the opposite of {word}.",
    "Please give me the opposite of {word}.",
    "what is the opposite of {word}",
    "I would like to know the opposite of {word}.",
    "The opposite of {word} is which word?",
    "I have a question: what is the opposite of the word {word}?",
)
OPPOSITE_ZH = (
    "{word}的反义词是什么？",
    "请告诉我{word}的反义词。",
    "{word}的反义词？",
    "你知道{word}的反义词吗？",
    "请告诉我{word}的反义词是什么。",
    "请问{word}的反义词是什么？",
    "和{word}意思相反的词是什么？",
    "说出{word}的反义词。",
    "哪个词是{word}的反义词？",
    "你知道哪个词和{word}意思相反吗？",
    "{word}的反义词是哪个词？",
    "我想知道{word}的反义词。",
    "能告诉我{word}的反义词吗？",
    "我在学习{word}这个词，它的反义词是什么？",
    "我想知道和{word}意思相反的词。",
    "哪个词和{word}意思相反？",
    "请说出和{word}意思相反的词。",
    "{word}这个词的反义词是什么？",
    "我有一个问题：{word}的反义词是什么？",
    "请问哪个词是{word}的反义词？",
)
PLURAL_EN = (
    "What is the plural of {word}?",
    "Tell me the plural of {word}.",
    "plural of {word}?",
    "What is the plural form of {word}?",
    "Can you tell me what the plural form of {word} is?",
    "What's the plural of {word}?",
    "Give me the plural of the word {word}.",
    "Do you know the plural of {word}?",
    "How do you write the plural of {word}?",
    "I would like to know how to write the plural of {word}.",
    "{Word}: what is the plural?",
    "Write the plural of {word}.",
    "I am learning the word {word}. What is its plural?",
    "Can you tell me the plural of {word}?",
    "I am learning the word {word}. Can you give me its plural form?",
    "Please write the plural form of {word}.",
    "what is the plural of {word}",
    "I would like to know the plural of {word}.",
    "One {word}, but two of what? Give me the plural.",
    "Do you know the plural form of the word {word}?",
)
COLOUR_EN = (
    "What colour is {thing}?",
    "What is the colour of {thing}?",
    "Tell me the colour of {thing}.",
    "Which colour is {thing}?",
    "Can you tell me which colour {thing} is?",
    "What is the usual colour of {thing}?",
    "colour of {thing}?",
    "What colour is {thing} usually?",
    "Do you know the colour of {thing}?",
    "Do you know which colour {thing} usually is?",
    "Which colour does {thing} have?",
    "Can you tell me what colour {thing} is?",
    "{Thing}: what colour is it?",
    "Please tell me what colour {thing} has.",
    "I would like to know the usual colour of {thing}.",
    "what colour is {thing}",
    "I want to paint {thing}. Which colour do I need?",
    "I would like to know what colour {thing} is.",
    "Name the colour of {thing}.",
    "I want to paint {thing}. What is the usual colour?",
)
COLOUR_ZH = (
    "{thing}是什么颜色的？",
    "{thing}是什么颜色？",
    "请告诉我{thing}的颜色。",
    "{thing}的颜色是什么？",
    "请告诉我{thing}是什么颜色的。",
    "{thing}通常是什么颜色的？",
    "你知道{thing}是什么颜色的吗？",
    "请问{thing}是什么颜色？",
    "{thing}有什么颜色？",
    "你知道{thing}通常是什么颜色吗？",
    "我想画{thing}，用什么颜色？",
    "我想知道{thing}是什么颜色。",
    "说出{thing}的颜色。",
    "能告诉我{thing}的颜色吗？",
    "我想知道{thing}的颜色是什么。",
    "{thing}一般是什么颜色？",
    "我有一个问题：{thing}是什么颜色的？",
    "请说出{thing}通常的颜色。",
    "画{thing}要用什么颜色？",
    "能告诉我{thing}一般是什么颜色的吗？",
)
CATEGORY_EN = (
    "What kind of thing is {thing}?",
    "Is {thing} {a} or {b}?",
    "What is {thing}, {a} or {b}?",
    "{Thing}: {a} or {b}?",
    "Can you tell me if {thing} is {a} or {b}?",
    "Tell me what kind of thing {thing} is.",
    "Is {thing} {a}, or is it {b}?",
    "What sort of thing is {thing}?",
    "Which is right: {thing} is {a}, or {thing} is {b}?",
    "Please tell me what sort of thing {thing} is.",
    "Can you tell me what kind of thing {thing} is?",
    "I would like to know what kind of thing {thing} is.",
    "Do you know if {thing} is {a} or {b}?",
    "Would you say that {thing} is {a} or {b}?",
    "Do you know what kind of thing {thing} is, {a} or {b}?",
    "is {thing} {a} or {b}",
    "{A} or {b}: which of them is {thing}?",
    "Please tell me if {thing} is {a} or {b}.",
    "My friend says that {thing} is {a}. I say it is {b}. Who is right?",
    "I would like to know if {thing} is {a} or {b}.",
)
CATEGORY_ZH = (
    "{thing}是哪一类东西？",
    "{thing}是{a}还是{b}？",
    "{thing}属于{a}还是{b}？",
    "请问{thing}是{a}还是{b}？",
    "请告诉我{thing}属于{a}还是{b}。",
    "请告诉我{thing}是{a}还是{b}。",
    "{thing}属于哪一类？",
    "你知道{thing}是{a}还是{b}吗？",
    "{thing}是一种{a}还是一种{b}？",
    "你知道{thing}属于哪一类东西吗？",
    "请问{thing}属于哪一类？",
    "我想知道{thing}是{a}还是{b}。",
    "{a}还是{b}，{thing}属于哪一类？",
    "能告诉我{thing}是哪一类东西吗？",
    "能告诉我{thing}是{a}还是{b}吗？",
    "{thing}应该算{a}还是{b}？",
    "我有一个问题：{thing}是{a}还是{b}？",
    "在{a}和{b}中，{thing}属于哪一类？",
    "我的朋友说{thing}是{a}，我说是{b}，谁对？",
    "我想知道{thing}属于哪一类，{a}还是{b}？",
)
SPELL_EN = (
    "Spell the word {word}.",
    "How do you spell {word}?",
    "Please spell {word}.",
    "Can you spell {word}?",
    "Can you tell me how to spell the word {word}?",
    "spell {word}",
    "How is the word {word} spelled?",
    "Spell {word} letter by letter.",
    "Tell me how to spell {word}.",
    "Please tell me how you spell {word}.",
    "Which letters are in the word {word}?",
    "Write the word {word} letter by letter.",
    "Spell this word: {word}",
    "I am learning the word {word}. How do you spell it?",
    "I am learning to spell. Can you spell the word {word} for me?",
    "Give me the letters of the word {word}.",
    "Could you spell the word {word} for me?",
    "I would like to know how to spell {word}.",
    "Write the letters of {word} one by one.",
    "Please write this word letter by letter: {word}",
)
REVERSE_EN = (
    "Write {word} backwards.",
    "Spell {word} backwards.",
    "What is {word} backwards?",
    "Reverse the word {word}.",
    "Can you tell me what the word {word} is backwards?",
    "Please reverse {word}.",
    "{word} backwards?",
    "How do you spell {word} backwards?",
    "Write the letters of {word} in reverse.",
    "Please write the word {word} in reverse.",
    "Can you write the word {word} backwards?",
    "reverse {word}",
    "Reverse this word: {word}",
    "Give me the word {word} in reverse.",
    "How do you write {word} in reverse?",
    "Spell the word {word} from the last letter to the first.",
    "Please spell {word} in reverse.",
    "I would like to know how to spell {word} backwards.",
    "Tell me the letters of {word} from last to first.",
    "Can you give me the letters of {word} backwards?",
)

# All wordings of the following lists are used in both splits; values are held out.
COUNT_EN = (
    "How many items are in this list: {items}?",
    "Count the items: {items}",
    "How many things are there: {items}?",
    "Count the words in this list: {items}",
    "{items}. How many items is that?",
    "Please count these things for me: {items}",
    "I have a list: {items}. How many items does it have?",
)
COUNT_ZH = (
    "这个列表里有几个：{items}？",
    "数一数有几个：{items}",
    "{items}，一共有几个？",
    "请数一数这些东西：{items}",
    "我有一个列表：{items}。里面一共有几个？",
    "一共有多少个：{items}？",
)
PICK_EN = (
    "What is the {position} item in this list: {items}?",
    "Which item is {position}: {items}?",
    "Give me the {position} item: {items}",
    "{items}. Which is the {position} item?",
    "Name the {position} item of this list: {items}",
    "I have a list: {items}. What is the {position} item?",
    "Please tell me the {position} item of the list {items}.",
)
PICK_ZH = (
    "这个列表里{position}是什么：{items}？",
    "{items}，{position}是什么？",
    "说出{position}：{items}",
    "请告诉我{position}是什么：{items}",
    "我有一个列表：{items}。{position}是什么？",
    "下面的列表里，{position}是哪个：{items}？",
)
SORT_EN = (
    "Put these words in alphabetical order: {items}",
    "Sort these words: {items}",
    "Sort the list alphabetically: {items}",
    "Write these words in alphabetical order: {items}",
    "{items}: put them in alphabetical order.",
    "Can you sort these words from A to Z: {items}?",
    "Please order these words alphabetically: {items}",
)


# ---------------------------------------------------------------------------------------------------------------
# Skills about facts: the wordings are held out.


def calendar(rng: Random, split: Split) -> Exchange:
    """Questions about the calendar: the day or month before or after a given one, the day tomorrow or yesterday, and
    the number of a month."""
    return one_of(rng, (_neighbour, _shift, _month))(rng, split)


def _neighbour(rng: Random, split: Split) -> Exchange:
    (unit, unit_zh), cycle = one_of(rng, CYCLES)
    (relation, relation_zh), step = one_of(rng, NEIGHBOURS)
    i = rng.randrange(len(cycle))
    (name, name_zh), (found, found_zh) = cycle[i], cycle[(i + step) % len(cycle)]
    if is_chinese(rng, CHINESE_SHARE):
        answer = f"{name_zh}的{relation_zh}一{unit_zh}是{found_zh}。"
        slots = {"unit": unit_zh, "relation": relation_zh, "name": name_zh}
        return ask(rng, split, "neighbour:zh", NEIGHBOUR_ZH, answer, **slots)
    answer = f"The {unit} {relation} {name} is {found}."
    return ask(rng, split, "neighbour:en", NEIGHBOUR_EN, answer, unit=unit, relation=relation, name=name)


def _shift(rng: Random, split: Split) -> Exchange:
    (shift, shift_zh), verb, step = one_of(rng, SHIFTS)
    i = rng.randrange(len(DAYS))
    (today, today_zh), (found, found_zh) = DAYS[i], DAYS[(i + step) % len(DAYS)]
    if is_chinese(rng, CHINESE_SHARE):
        answer = f"{shift_zh}是{found_zh}。"
        return ask(rng, split, f"shift:zh:{today_zh}", SHIFT_ZH, answer, today=today_zh, shift=shift_zh)
    answer = f"{capitalised(shift)} {'is' if step > 0 else 'was'} {found}."
    return ask(rng, split, f"shift:en:{today}", SHIFT_EN, answer, today=today, shift=shift, verb=verb)


def _month(rng: Random, split: Split) -> Exchange:
    i = rng.randrange(len(MONTHS))
    (month, month_zh), number = MONTHS[i], str(i + 1)
    if is_chinese(rng, CHINESE_SHARE):
        answer = f"{month_zh}是一年的第{number}个月。"
        return ask(rng, split, "month:zh", MONTH_ZH, answer, month=month_zh, number=number)
    answer = f"{month} is the {ORDINALS[i]} month of the year."
    return ask(rng, split, "month:en", MONTH_EN, answer, month=month, number=number, ordinal=ORDINALS[i])


def opposite(rng: Random, split: Split) -> Exchange:
    """The opposite of a word, from either word of a pair."""
    chinese = is_chinese(rng, CHINESE_SHARE)
    word, other = rng.sample(one_of(rng, OPPOSITES_ZH if chinese else OPPOSITES_EN), 2)
    if chinese:
        return ask(rng, split, "opposite:zh", OPPOSITE_ZH, f"{word}的反义词是{other}。", word=word)
    return ask(rng, split, "opposite:en", OPPOSITE_EN, f"The opposite of {word} is {other}.", word=word)


def plural_of(noun: str) -> str:
    """Plural of an English noun in the tables."""
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun}s"


def plural(rng: Random, split: Split) -> Exchange:
    """The plural of an English noun."""
    noun = one_of(rng, NOUNS)
    return ask(rng, split, "plural:en", PLURAL_EN, f"The plural of {noun} is {plural_of(noun)}.", word=noun)


def colour(rng: Random, split: Split) -> Exchange:
    """The usual colour of a thing."""
    thing, thing_zh, name = one_of(rng, COLOURED)
    if is_chinese(rng, CHINESE_SHARE):
        return ask(rng, split, "colour:zh", COLOUR_ZH, f"{thing_zh}是{dict(COLOURS)[name]}的。", thing=thing_zh)
    return ask(rng, split, "colour:en", COLOUR_EN, f"{capitalised(thing)} is {name}.", thing=thing)


def with_article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def category(rng: Random, split: Split) -> Exchange:
    """The category of something, with or without two categories to choose from."""
    kind, other = rng.sample(KIND_NAMES, 2)
    thing, thing_zh = one_of(rng, KINDS[kind])
    a, b = rng.sample((kind, other), 2)
    if is_chinese(rng, CHINESE_SHARE):
        return ask(rng, split, "category:zh", CATEGORY_ZH, f"{thing_zh}是{kind[1]}。", thing=thing_zh, a=a[1], b=b[1])
    subject = thing if kind[0] in BARE_KINDS else with_article(thing)
    answer = f"{capitalised(subject)} is {kind[0]}."
    return ask(rng, split, "category:en", CATEGORY_EN, answer, thing=subject, a=a[0], b=b[0])


def spell(rng: Random, split: Split) -> Exchange:
    """The letters of a word."""
    word = one_of(rng, WORDS)
    return ask(rng, split, "spell:en", SPELL_EN, f"{word}: {'-'.join(word)}", word=word)


def reverse(rng: Random, split: Split) -> Exchange:
    """The letters of a word in reverse."""
    word = one_of(rng, WORDS)
    return ask(rng, split, "reverse:en", REVERSE_EN, f"{word}: {'-'.join(reversed(word))}", word=word)


# ---------------------------------------------------------------------------------------------------------------
# Skills about lists: the lists are held out.


def _some_items(rng: Random, split: Split, chinese: bool, smallest: int, largest: int) -> tuple[str, ...]:
    """A list of distinct items that belongs to this split."""

    def make() -> tuple[str, ...]:
        return tuple(pair[chinese] for pair in rng.sample(LISTED, rng.randint(smallest, largest)))

    return split.draw(make, key=lambda items: items)


def _joined(items: tuple[str, ...], chinese: bool) -> str:
    return ("、" if chinese else ", ").join(items)


def count_list(rng: Random, split: Split) -> Exchange:
    """The number of items in a list."""
    chinese = is_chinese(rng, CHINESE_SHARE)
    items = _some_items(rng, split, chinese, 1, 9)
    joined, number = _joined(items, chinese), len(items)
    question = one_of(rng, COUNT_ZH if chinese else COUNT_EN).format(items=joined)
    english = "There is 1 item." if number == 1 else f"There are {number} items."
    return Exchange(question, f"一共有{number}个。" if chinese else english, f"count list:{joined}")


def pick_list(rng: Random, split: Split) -> Exchange:
    """The first, second, third or last item of a list."""
    chinese = is_chinese(rng, CHINESE_SHARE)
    items = _some_items(rng, split, chinese, 3, 7)
    joined = _joined(items, chinese)
    i = one_of(rng, (0, 1, 2, -1))
    position = POSITIONS[i][chinese]
    question = one_of(rng, PICK_ZH if chinese else PICK_EN).format(items=joined, position=position)
    answer = f"{position}是{items[i]}。" if chinese else f"The {position} item is {items[i]}."
    return Exchange(question, answer, f"pick from list:{joined}:{position}")


def sort_words(rng: Random, split: Split) -> Exchange:
    """A few English words in alphabetical order; their first letters differ."""

    def make() -> tuple[str, ...]:
        initials = rng.sample(sorted(BY_INITIAL), rng.randint(3, 5))
        return tuple(one_of(rng, BY_INITIAL[initial]) for initial in initials)

    words = split.draw(make, key=sorted)
    question = one_of(rng, SORT_EN).format(items=", ".join(words))
    return Exchange(question, ", ".join(sorted(words)), f"sort words:{':'.join(sorted(words))}")


SKILLS: dict[str, Skill] = {
    "calendar": calendar,
    "opposite": opposite,
    "plural": plural,
    "colour": colour,
    "category": category,
    "count list": count_list,
    "pick from list": pick_list,
    "sort words": sort_words,
    "spell": spell,
    "reverse": reverse,
}
